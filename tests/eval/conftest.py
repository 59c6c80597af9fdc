import pytest
import torch

from lamella.eval.task import TaskConfig, TaskRow, build_task
from tests.eval.oracle import OracleEngine, TokenizerEncoder
from tests.fixtures import WORDS, dense_config, make_tokenizer, random_model

LABELS = ("street name", "street number", "city")


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def encoder(tokenizer):
    return TokenizerEncoder(tokenizer)


@pytest.fixture(scope="session")
def model():
    torch.set_num_threads(1)
    return random_model(dense_config(max_position_embeddings=2048), std=0.3)


@pytest.fixture(scope="session")
def engine(model):
    return OracleEngine(model)


def fcls(rows=60, documents=20, labels=LABELS, tenants=("left", "right")):
    """F-CLS: rows of 5 to 200 tokens; three rows of each text one after the other."""
    made = []
    for i in range(rows):
        d = i % documents
        text = " ".join(WORDS[(d * 11 + k * k) % len(WORDS)] for k in range(2 + d * 3))
        made.append(TaskRow(tenant=tenants[d % len(tenants)], text=text, entity=WORDS[i % len(WORDS)],
                            label=labels[(i * 7 + d) % len(labels)], id=i))  # fmt: skip
    return made


@pytest.fixture(scope="session")
def task():
    config = TaskConfig(
        name="fcls", system="Labels: {labels}", prompt="{text}\nWhat is {entity}?",
        labels={"left": LABELS, "right": LABELS},
    )  # fmt: skip
    train = [r.model_copy(update={"text": r.text + " again", "id": f"t{r.id}"}) for r in fcls(30, 15)]
    return build_task(config, train, fcls())
