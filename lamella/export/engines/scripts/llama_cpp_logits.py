"""llama.cpp through llama-cpp-python: logits of prompts at their last positions, with the adapter and without."""

import json
import sys
from typing import Any


def main() -> None:
    import llama_cpp
    import numpy as np

    with open(sys.argv[1]) as stream:
        request = json.load(stream)
    longest = max(len(ids) for ids in request["prompts"])

    def every(adapter: Any) -> list[Any]:
        model = llama_cpp.Llama(
            request["model"], lora_path=adapter, n_ctx=max(longest, 16), n_batch=max(longest, 16),
            n_ubatch=max(longest, 16), logits_all=True,
            type_k=llama_cpp.GGML_TYPE_F32,  # its cache is fp16 by default, which alone moves log p by 0.04
            type_v=llama_cpp.GGML_TYPE_F32, n_threads=request["threads"], verbose=False,
        )  # fmt: skip
        found = []
        for ids, first in zip(request["prompts"], request["first"], strict=True):
            model.reset()
            model.eval(ids)
            found.append(np.array(model.scores[first : len(ids)], dtype=np.float32))
        model.close()
        return found

    result: dict[str, Any] = {f"tuned_{i}": part for i, part in enumerate(every(request["adapter"]))}
    if request["base_too"]:
        result |= {f"base_{i}": part for i, part in enumerate(every(None))}
    result["version"] = np.array(f"llama-cpp-python {llama_cpp.__version__}")
    np.savez(sys.argv[2], **result)


main()
