"""transformers + PEFT: logits of prompts at their last positions, with the adapter and without."""

import json
import sys
from typing import Any


def main() -> None:
    import numpy as np
    import torch
    import transformers

    with open(sys.argv[1]) as stream:
        request = json.load(stream)
    torch.set_num_threads(request["threads"])
    factory: Any = transformers.AutoModelForCausalLM
    model, told = factory.from_pretrained(
        request["model"], dtype=getattr(torch, request["dtype"]), output_loading_info=True
    )
    wrong = {key: sorted(map(str, told[key]))[:3] for key in ("missing_keys", "mismatched_keys") if told.get(key)}
    if wrong:
        raise SystemExit(f"weights without a source: {wrong}")
    version = f"transformers {transformers.__version__}"
    if request["adapter"] is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, request["adapter"])
        version += f", peft {peft.__version__}"
    model.eval()

    def every(which: str) -> dict[str, Any]:
        found = {}
        for i, (ids, first) in enumerate(zip(request["prompts"], request["first"], strict=True)):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            found[f"{which}_{i}"] = logits[0, first:].float().numpy()
        return found

    found = every("tuned")
    if request["base_too"]:
        with model.disable_adapter():
            found |= every("base")
    found["version"] = np.array(version)
    np.savez(sys.argv[2], **found)


main()
