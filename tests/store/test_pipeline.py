"""Reading, quantising and writing go on at the same time, as far as the queues between them reach."""

from __future__ import annotations

import threading
import time

import torch

from lamella.checkpoint.source import Checkpoint
from lamella.store.journal import Journal
from lamella.store.pipeline import _CHUNKS_IN_FLIGHT, _WRITES_IN_FLIGHT, run_pipeline
from lamella.store.quantize import QuantizeSettings, plan_store
from tests.checkpoint.helpers import embedding, layer_config, write_tensors

TENSORS = 40
DEADLINE_S = 60  # of a test that hangs; nothing is measured


class CountingCheckpoint(Checkpoint):
    reads = 0

    def read_into(self, tensor, start, buffer):
        super().read_into(tensor, start, buffer)
        self.reads += 1


class HeldJournal(Journal):
    """Holds the writer when the first file is complete."""

    def __init__(self, *args):
        super().__init__(*args)
        self.reached, self.go = threading.Event(), threading.Event()

    def finish_group(self, key, checksums):
        self.reached.set()
        assert self.go.wait(DEADLINE_S)
        super().finish_group(key, checksums)


def until(condition) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_reader_and_quantiser_advance_while_the_writer_is_held(tmp_path):
    tensors = {f"model.layers.0.mlp.a{i}_proj.weight": torch.randn(64, 64) for i in range(TENSORS)}
    source = write_tensors(tmp_path / "c", layer_config(), {**embedding(), **tensors})
    settings = QuantizeSettings(double_quant=False)  # each tensor is two writes: codes and scales
    quantised = []
    with CountingCheckpoint.open(source) as checkpoint:
        plan = plan_store(checkpoint, settings)
        checkpoint.reads = 0
        with HeldJournal.open(tmp_path / "store", {}, plan.groups) as journal:
            failed = []

            def work():
                try:
                    run_pipeline(checkpoint, plan.groups, journal,
                                 advance=lambda nbytes, file: quantised.append(file), threads=1)  # fmt: skip
                except BaseException as error:
                    failed.append(error)
                    raise

            thread = threading.Thread(target=work)
            thread.start()
            try:
                assert journal.reached.wait(DEADLINE_S)
                through = 1 + _WRITES_IN_FLIGHT // 2  # the embeddings; then tensors until the writer's queue is full
                read_ahead = through + 1 + _CHUNKS_IN_FLIGHT  # the one that waits to be queued; then all buffers
                until(lambda: len(quantised) == through and checkpoint.reads == read_ahead)
                time.sleep(0.3)  # room to go wrong: no one may run past the queues
                assert (len(quantised), checkpoint.reads) == (through, read_ahead)
                assert not journal.done
            finally:
                journal.go.set()
                thread.join(DEADLINE_S)
            assert not failed
            assert set(journal.done) == {"outer", "0"}
            assert (len(quantised), checkpoint.reads) == (1 + TENSORS, 1 + TENSORS)
