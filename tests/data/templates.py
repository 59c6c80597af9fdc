"""Chat template variants, written for the tests after the quirks of well-known families."""

from tests.fixtures import CHATML

GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# ChatML that prints tools when given, calls as JSON from objects, tool results in their own turn.
TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + GENERATE
)

# The same, but arguments must come as JSON text.
TOOLS_TEXT = TOOLS.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}")

# Reasoning only in the last assistant turn, read from `reasoning_content` or from <think> in the content.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set r = m.reasoning_content or '' %}{% set c = m.content %}"
    "{% if not r and '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last and r %}<think>\n{{ r | trim }}\n</think>\n\n{% endif %}{{ c }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + GENERATE
)

# Keeps reasoning in all turns.
REASONING_ALL = REASONING.replace("loop.last and r", "r")

# Only knows <think> inside the content and strips it from all but the last turn.
REASONING_INLINE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + GENERATE
)

# Opens <think> in the generation prompt.
REASONING_OPEN = REASONING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

# Default system text.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nDefault text D<|im_end|>\n{% endif %}" + CHATML
)

# No system turn, strict alternation.
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}" + GENERATE
)

# Template text holds BOS.
BOS = "{{ bos_token }}" + CHATML

# In the manner of Mistral: no generation prompt, eos after answers, text markers.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}<|eos|>{% endif %}{% endfor %}"
)

# Generation markers around only part of the answer.
PART_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.content[:3] }}"
    "{% generation %}{{ m.content[3:] }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    + GENERATE
)

# Ignores add_generation_prompt.
NO_GENERATION = CHATML.split("{% if add_generation_prompt")[0]

# In the manner of Qwen 3: reasoning stays after the last user turn, the last answer gets an empty <think>, tool
# results are grouped inside user turns.
GROUPED_TOOLS = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content.lstrip('\n') }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}" + GENERATE
)

# In the manner of Phi 3: its control tokens swallow the white space after them.
SWALLOWING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
