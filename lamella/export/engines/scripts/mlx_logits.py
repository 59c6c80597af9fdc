"""mlx-lm: logits of prompts at their last positions, with the adapter and without."""

import json
import sys
from typing import Any


def main() -> None:
    import mlx.core as mx
    import mlx_lm
    import numpy as np

    with open(sys.argv[1]) as stream:
        request = json.load(stream)

    def every(adapter: Any) -> list[Any]:
        model, _ = mlx_lm.load(request["model"], adapter_path=adapter)
        model.set_dtype(getattr(mx, request["dtype"]))
        found = []
        for ids, first in zip(request["prompts"], request["first"], strict=True):
            found.append(np.array(model(mx.array([ids]))[0, first:].astype(mx.float32)))
        return found

    result: dict[str, Any] = {f"tuned_{i}": part for i, part in enumerate(every(request["adapter"]))}
    if request["base_too"]:
        result |= {f"base_{i}": part for i, part in enumerate(every(None))}
    result["version"] = np.array(f"mlx-lm {mlx_lm.__version__}")
    np.savez(sys.argv[2], **result)


main()
