"""The documentation: generated pages are fresh, links lead somewhere, commands in guides run."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lamella.cli import app
from tests.checkpoint.published import CONFIGS
from tests.guide.write_reference import FOLDER, PAGES

DOCS = FOLDER.parent
FILES = sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_fresh(name):
    assert (FOLDER / name).read_text() == PAGES[name](), "run python -m tests.guide.write_reference"


def anchors(file: Path) -> set[str]:
    """Of its headings, as the site makes them."""
    heads = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(DOCS)))
def test_links_lead_somewhere(file):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", file.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        there = (file.parent / target).resolve() if target else file
        assert there.exists(), f"{file.name}: {link}"
        assert not anchor or anchor in anchors(there), f"{file.name}: {link}"


def test_every_page_is_in_the_site():
    nav = (DOCS.parent / "mkdocs.yml").read_text()
    listed = set(re.findall(r": ([\w/.-]+\.md)$", nav, flags=re.M))
    assert listed == {str(f.relative_to(DOCS)) for f in FILES}
    assert "font: false" in nav and "strict: true" in nav


GUIDES = [
    (f.name, block)
    for f in sorted((DOCS / "hardware").glob("*.md"))
    for block in re.findall(r"```plan\n(.*?)```", f.read_text(), flags=re.S)
]


@pytest.mark.parametrize(
    ("name", "block"), [g for g in GUIDES if g[0] != "cpu.md"], ids=lambda x: x if x.endswith(".md") else ""
)
def test_plans_of_the_guides_run(name, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-235B-A22B"]))
    words = shlex.split(block)
    assert words[:2] == ["lamella", "plan"]
    result = CliRunner().invoke(app, [*words[1:], "--json"])
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["fits"]


def test_every_hardware_guide_has_a_plan():
    assert {name for name, _ in GUIDES} == {"cpu.md", "one-gpu.md", "many.md", "mixed.md", "no-gpu-yet.md"}
