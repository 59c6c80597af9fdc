"""The light tokenizer gives the ids and masks that transformers' gives."""

import json
import subprocess
import sys

import pytest

from lamella.data.encode import Encoder, load_tokenizer
from lamella.data.formats import read_conversation
from lamella.data.light import open_light
from lamella.errors import UserError
from tests.data import templates
from tests.fixtures import CHATML, chat12, make_tokenizer

GENERATION = CHATML.replace(
    "{{ m['content'] }}<|im_end|>\n", "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
)
TEMPLATES = {
    "chatml": CHATML, "tools": templates.TOOLS, "reasoning": templates.REASONING_ALL, "generation": GENERATION,
    "bos": "{{ bos_token }}" + CHATML, "break": CHATML.replace("{% endfor %}", "{% if loop.last %}{% break %}{% endif %}{% endfor %}"),
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_ids_and_labels_are_those_of_transformers(template, tmp_path):
    make_tokenizer(template).save_pretrained(tmp_path)
    known, light = Encoder(load_tokenizer(tmp_path)), Encoder(open_light(tmp_path))
    assert light.stop_ids == known.stop_ids and light.text.special == known.text.special
    rows = chat12()
    rows[3]["messages"][1]["content"] += " <|im_end|> café"
    for row in rows:
        conversation = read_conversation(row)[1]
        mine, theirs = light.encode(conversation), known.encode(conversation)
        assert (mine.ids, mine.mask, mine.notes) == (theirs.ids, theirs.mask, theirs.notes)


def test_plain_rows_without_a_template(tmp_path):
    make_tokenizer(None).save_pretrained(tmp_path)
    known, light = Encoder(load_tokenizer(tmp_path)), Encoder(open_light(tmp_path))
    row = read_conversation({"prompt": "the layer", "completion": " walk"})[1]
    assert light.encode(row).ids == known.encode(row).ids


def test_a_folder_without_one_and_a_broken_one(tmp_path):
    assert open_light(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="broken JSON"):
        open_light(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}), encoding="utf-8")
    with pytest.raises(UserError, match="no usable tokenizer"):
        open_light(tmp_path)


def test_counting_imports_neither_torch_nor_transformers(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    code = (
        "import sys; from pathlib import Path; from lamella.data.light import open_light;"
        "from lamella.data.dataset import encode_rows; import lamella.forecast.rows;"
        "from lamella.data.encode import Encoder;"
        "Encoder(open_light(Path(sys.argv[1]))); print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
