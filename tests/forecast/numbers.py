"""Works formulas of `Number`s out again."""

import math

NAMES = {"floor": math.floor, "ceil": math.ceil, "min": min, "max": max, "sum": sum}


def worked_out(number):
    """The value of a number's formula at its inputs."""
    return eval(number.formula, {"__builtins__": {}}, {**NAMES, **number.inputs})


def check(numbers):
    """Every number with numeric inputs is what its formula gives."""
    checked = 0
    for number in numbers:
        if number.inputs and not any(isinstance(value, str) for value in number.inputs.values()):
            found = worked_out(number)
            assert math.isclose(found, number.value, rel_tol=1e-9, abs_tol=1e-12), (number, found)
            checked += 1
    return checked
