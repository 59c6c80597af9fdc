"""Handing over: what is exported, the command, its flags checked, its start; texts as in training."""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lamella.adapter import Adapter
from lamella.config import LoraConfig
from lamella.data.encode import Encoder
from lamella.engine import Engine
from lamella.errors import UserError
from lamella.serve.handover import hand_over, with_system
from lamella.serve.settings import load_serve_config
from lamella.store.reader import Store
from tests.data.templates import STRICT
from tests.export.conftest import T1
from tests.fixtures import CHATML, chat12, make_tokenizer

SYSTEMS = ["Be short.", "It's \"{{ odd }}\" {% x %} \\n\n\tc:\\new é 🙂 'a'"]


@pytest.mark.parametrize("template", [CHATML, T1, STRICT], ids=["chatml", "t1", "strict"])
@pytest.mark.parametrize("system", SYSTEMS, ids=["short", "odd"])
def test_b79_the_template_handed_over_renders_what_training_encodes(template, system):
    tokenizer = make_tokenizer(template)
    encoder = Encoder(tokenizer, chat_template=template, system=system)
    folded = encoder.template.system == "folded"
    assert folded == (template is STRICT)
    handed = with_system(template, system, folded=folded)
    for row in chat12()[:4]:
        question = row["messages"][0]
        for messages in ([question], [{"role": "system", "content": "Own."}, question]):
            text = tokenizer.apply_chat_template(
                messages, chat_template=handed, add_generation_prompt=True, tokenize=False
            )
            assert text == encoder.text.decode(encoder.encode_prompt(messages))
    assert with_system(template, None) == template


@pytest.fixture(scope="module")
def wide(tiny, tmp_path_factory):
    """An adapter of a rank that vLLM does not take."""
    engine = Engine.open(Store.open(tiny.store), dtype="fp32", threads=1)
    adapter = Adapter.create(engine.skeleton, LoraConfig(rank=513, alpha=513, targets=("q_proj",)), seed=0)
    with torch.no_grad():
        for name, p in adapter.parameters().items():
            if name.endswith("lora_B"):
                p.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("wide") / "wide"
    adapter.save(folder)
    engine.close()
    return folder


def settings(tiny, folder, extra=""):
    path = tiny.settings(folder)
    path.write_text(path.read_text().replace("port = 0", "port = 9000") + extra)
    return load_serve_config(path)


def flag(command, name):
    return command[command.index(name) + 1]


def test_adapters_are_exported_and_the_command_is_written(tiny, wide, tmp_path):
    (tiny.adapters["t2"] / "lamella_adapter.json").write_text(json.dumps({"system": "Be short."}))
    more = "".join(
        f'[[adapters]]\nname = "{n}"\npath = "{p}"\n' for n, p in (("short", tiny.adapters["t2"]), ("wide", wide))
    )
    config = settings(tiny, tmp_path, more)
    out = tmp_path / "out"
    hand_over(config, "vllm", out, start=False, extra=["--tensor-parallel-size", "4"])
    told = json.loads((out / "handover.json").read_text())
    both, short, merged = told["servers"]
    assert [s["port"] for s in told["servers"]] == [9000, 9001, 9002]
    assert [s["served"] for s in told["servers"]] == ["base", "base.1", "wide"]
    command = both["command"]
    assert command[:2] == ["vllm", "serve"]
    assert flag(command, "--model") == str(out / "base")
    assert flag(command, "--max-lora-rank") == "8"
    assert flag(command, "--tensor-parallel-size") == "4"
    modules = [json.loads(word) for word in command[command.index("--lora-modules") + 1 :][:2]]
    assert [(m["name"], m["path"]) for m in modules] == [(n, str(out / "adapters" / n)) for n in ("t0", "t1")]
    assert (out / "adapters/t0/adapter_model.safetensors").is_file()
    assert "Be short." in Path(flag(short["command"], "--chat-template")).read_text()
    generation = Path(flag(short["command"], "--generation-config")) / "generation_config.json"
    assert json.loads(generation.read_text())["eos_token_id"] == [4]
    assert flag(merged["command"], "--model") == str(out / "merged/wide")
    assert "--enable-lora" not in merged["command"]
    assert shlex.join(command) in (out / "start-0.sh").read_text()
    assert any("not checked" in note for note in told["notes"])
    times = {p: p.stat().st_mtime_ns for p in (out / "base").iterdir()}
    hand_over(config, "vllm", out, start=False)
    assert times == {p: p.stat().st_mtime_ns for p in (out / "base").iterdir()}
    with pytest.raises(UserError, match="another handover"):
        hand_over(config, "sglang", out, start=False)
    with pytest.raises(UserError, match="not installed"):
        hand_over(config, "vllm", tmp_path / "other", start=True)
    assert not (tmp_path / "other").exists()


def test_sglang(tiny, tmp_path):
    hand_over(settings(tiny, tmp_path), "sglang", tmp_path / "out", start=False, base="some/hub-id")
    command = json.loads((tmp_path / "out/handover.json").read_text())["servers"][0]["command"]
    assert flag(command, "--model-path") == "some/hub-id"
    assert command[-2:] == [f"{n}={tmp_path / 'out/adapters' / n}" for n in ("t0", "t1")]
    assert not (tmp_path / "out/base").exists()


FLAGS = ["--model", "--host", "--port", "--served-model-name", "--chat-template", "--generation-config", "--max-logprobs", "--enable-lora",
         "--max-lora-rank", "--max-loras", "--max-cpu-loras", "--lora-modules", *(f"--other-{n}" for n in "abcdefghijklmn")]  # fmt: skip


def fake_python(folder, flags):
    """An engine's Python: it has the module, tells these flags, and serves by writing its arguments down."""
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"#!{sys.executable}\nimport sys, time, pathlib\n"
        "if sys.argv[1] == '-c': sys.exit(0)\n"
        f"if sys.argv[-1] == '--help=all': print({' '.join(flags)!r}); sys.exit(0)\n"
        f"pathlib.Path({str(folder / 'ran')!r}).write_text(' '.join(sys.argv[1:]))\ntime.sleep(60)\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_flags_are_checked(tiny, tmp_path):
    python = fake_python(tmp_path / "old", [f for f in FLAGS if f != "--max-loras"])
    with pytest.raises(UserError, match="does not know --max-loras"):
        hand_over(settings(tiny, tmp_path), "vllm", tmp_path / "out", python=python, base="x", start=False)
    assert not (tmp_path / "out/start-0.sh").exists()


def test_the_engine_is_started_and_stopped(tiny, tmp_path):
    settings(tiny, tmp_path)
    python = fake_python(tmp_path / "new", FLAGS)
    command = [sys.executable, "-m", "lamella", "serve", str(tmp_path / "serve.toml"), "--engine", "vllm", "--python", str(python),
               "--base", "x", "-o", str(tmp_path / "out")]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        end_s = time.monotonic() + 60
        while not (tmp_path / "new/ran").exists() and process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.05)
        assert "--enable-lora" in (tmp_path / "new/ran").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
