"""An engine that knows nothing of packing: each scored pair alone, its visible tokens through plain transformers."""

from dataclasses import dataclass

import torch


@dataclass
class OracleGeneration:
    ids: list[int]
    finish: str


class OracleEngine:
    def __init__(self, model):
        self.model = model
        self.config = model.config
        self.tokens_seen = 0
        self._logps = {}

    @torch.no_grad()
    def logps(self, ids):
        """Log-probabilities of the token after `ids`: fp32 [vocab]."""
        key = tuple(ids)
        if key not in self._logps:
            logits = self.model(torch.tensor([key])).logits[0, -1]
            self._logps[key] = torch.log_softmax(logits.float(), -1)
        return self._logps[key]

    def score(self, batches):
        out = []
        for b in batches:
            self.tokens_seen += b.tokens
            values = []
            for position, token in zip(b.score_positions.tolist(), b.score_tokens.tolist(), strict=True):
                start = max(s for s in b.starts.tolist() if s <= position)
                seen = [j for j in range(start, position + 1) if b.visible_until[j] > position]
                assert b.position_ids[seen].tolist() == list(range(len(seen)))
                values.append(self.logps(b.input_ids[seen].tolist())[token])
            out.append(torch.stack(values))
        return out

    def generate(self, prompts, max_new_tokens, stop_ids):
        done = []
        for prompt in prompts:
            ids, finish = [], "length"
            while len(ids) < max_new_tokens:
                token = int(self.logps([*prompt, *ids]).argmax())
                ids.append(token)
                if token in stop_ids:
                    finish = "stop"
                    break
            done.append(OracleGeneration(ids, finish))
        return done


class TokenizerEncoder:
    """Prompt and answer encoded apart, with a tokenizer's own chat template."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.system = None
        self.stop_ids = {tokenizer.convert_tokens_to_ids("<|im_end|>")}

    def prompt_ids(self, messages):
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer_ids(self, text):
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], *self.stop_ids]

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class SaysEngine:
    """Generates given texts, one per prompt in order; None of it is computed."""

    class _Config:
        max_position_embeddings = None

    config = _Config()

    def __init__(self, encoder, outputs):
        self.encoder = encoder
        self.outputs = list(outputs)

    def generate(self, prompts, max_new_tokens, stop_ids):
        done = []
        for _ in prompts:
            ids = self.encoder.answer_ids(self.outputs.pop(0))
            cut = len(ids) > max_new_tokens
            done.append(OracleGeneration(ids[:max_new_tokens], "length" if cut else "stop"))
        return done
