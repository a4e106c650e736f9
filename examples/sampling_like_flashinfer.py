"""Code written for flashinfer.sampling, on a machine without a GPU: the import is all that changes."""

import torch

from lanewise.compat import flashinfer as sampling

torch.manual_seed(0)
logits = torch.randn(4, 32_000) * 3

probs = sampling.softmax(logits, temperature=0.7)
ids, valid = sampling.top_p_sampling_from_probs(probs, 0.9, seed=42, offset=0, return_valid=True)
print("rows", ids.tolist(), "all valid:", bool(valid.all()))

# One value a row; from logits in one pass, without a softmax written out.
top_k = torch.tensor([1, 10, 50, 1000], dtype=torch.int32)
top_p = torch.tensor([1.0, 0.5, 0.9, 0.95])
ids = sampling.top_k_top_p_sampling_from_logits(logits, top_k, top_p, seed=42, offset=1)
print("rows", ids.tolist(), "the first is the argmax:", ids[0].item() == logits[0].argmax().item())

# Many draws from one row: `indices` names the row of each.
rows = torch.zeros(10_000, dtype=torch.int32)
best = logits[0].argmax()
share = (sampling.sampling_from_probs(probs, rows, seed=42, offset=2) == best).float().mean()
print(f"the best id of row 0: {share:.3f} of the draws, {probs[0, best]:.3f} of the probability")

# A step of speculation: a draft that is hotter than its target, and the target's row for the id after it.
draft, target = sampling.softmax(logits[:2], temperature=1.0)[:, None], torch.stack([probs[:2], probs[2:]], dim=1)
drafted = sampling.sampling_from_probs(draft[:, 0], seed=7, offset=0)
out, accepted, _ = sampling.chain_speculative_sampling(draft, drafted[:, None], target, seed=7, offset=1)
print("rows", out.tolist(), "accepted", accepted.tolist())
