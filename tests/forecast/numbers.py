"""Works formulas of `Number`s out again."""

import math

NAMES = {"floor": math.floor, "ceil": math.ceil, "min": min, "max": max, "sum": sum}


def is_expression(formula):
    """Words do not parse as Python."""
    try:
        compile(formula, "formula", "eval")
    except SyntaxError:
        return False
    return True


def check(numbers):
    """Every number whose formula is an expression is what that gives. Returns how many there were."""
    checked = 0
    for number in numbers:
        if is_expression(number.formula):
            found = eval(number.formula, {"__builtins__": {}}, {**NAMES, **number.inputs})
            assert math.isclose(found, number.value, rel_tol=1e-9, abs_tol=1e-12), (number, found)
            checked += 1
    return checked
