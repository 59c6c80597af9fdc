"""tickets.csv into rows to train on and rows to measure on: `python examples/tickets.py`."""

import csv
import json
from pathlib import Path

HERE, OUT = Path(__file__).parent, Path("tickets")
QUESTION = "Which queue is this ticket for?\n{text}"

OUT.mkdir(exist_ok=True)
with (HERE / "tickets.csv").open(encoding="utf-8", newline="") as file:
    rows = list(csv.DictReader(file))
train, test = rows[:28], rows[28:]  # the file is in no order

with (OUT / "train.jsonl").open("w", encoding="utf-8") as file:
    for row in train:
        turns = [
            {"role": "user", "content": QUESTION.format(text=row["message"])},
            {"role": "assistant", "content": row["queue"]},
        ]
        file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
for side, some in (("train", train), ("test", test)):
    with (OUT / f"rows-{side}.jsonl").open("w", encoding="utf-8") as file:
        for row in some:
            file.write(
                json.dumps({"tenant": "support", "text": row["message"], "label": row["queue"]}, ensure_ascii=False)
                + "\n"
            )

(OUT / "task.toml").write_text(
    f"""name = "tickets"
train = "rows-train.jsonl"
test = "rows-test.jsonl"
prompt = {json.dumps(QUESTION)}
[labels]
support = {json.dumps(sorted({row["queue"] for row in rows}))}
""",
    encoding="utf-8",
)
