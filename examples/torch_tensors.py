"""A model's head and the draw of a token in one compiled graph, and a gradient through lanewise's log_softmax."""

import torch

import lanewise.compat.torch as lt

torch.manual_seed(0)
head = torch.nn.Linear(64, 32_000, bias=False)
hidden = torch.randn(4, 64)


@torch.compile(fullgraph=True, backend="aot_eager")
def step(hidden: torch.Tensor, position: int) -> torch.Tensor:
    logits = head(hidden)
    return lt.sample(logits, temperature=0.7, top_k=50, top_p=0.9, seed=42, step=position)


with torch.no_grad():
    compiled = [step(hidden, position).tolist() for position in range(5)]
    logits = head(hidden)
plain = [lt.sample(logits, temperature=0.7, top_k=50, top_p=0.9, seed=42, step=i).tolist() for i in range(5)]
print("compiled:", compiled)
print("the same without a compiler:", compiled == plain)
assert compiled == plain

loss = -lt.log_softmax(head(hidden))[torch.arange(4), torch.tensor(compiled[0])].mean()
loss.backward()
print(f"loss {loss.item():.3f}, gradient of norm {head.weight.grad.norm().item():.3f}")

narrow = logits.bfloat16()  # used as it is, and edited in place
lt.apply_token_bitmask(narrow, torch.tensor([0b1010], dtype=torch.int32), out=narrow)
print("allowed:", torch.isfinite(narrow[0]).nonzero().flatten().tolist())
