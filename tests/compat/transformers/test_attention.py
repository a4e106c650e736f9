"""attn_implementation="lanewise" beside "eager", on random models of families that ask for more than masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import lanewise.compat.transformers as compat

IDS = torch.tensor([[5, 17, 80, 3, 9, 44, 21, 60, 2, 4], [0, 0, 0, 7, 33, 60, 8, 1, 90, 12]])
MASK = (IDS != 0).long()
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": None, "pad_token_id": 0}
WINDOW = 4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "no groups": ("Llama", {"num_key_value_heads": 4}),
    "sliding window": ("Mistral", {"sliding_window": WINDOW}),
    "soft cap, window": ("Gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "scale of its own": ("Gemma3Text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 3}),
    "sinks, window": ("GptOss", {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


def made(family: str, attention: str) -> Any:
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES, **{**HEADS, **own}, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for each, parameter in model.named_parameters():
        if each.endswith("sinks"):
            torch.nn.init.normal_(parameter, 1.0, 1.0)
    return model


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_texts_are_eagers(family: str) -> None:
    eager, ours = made(family, "eager"), made(family, "lanewise")
    assert ours.config._attn_implementation == "lanewise"
    with torch.no_grad():
        for mask in (MASK, torch.ones_like(MASK)):
            want, got = (model(IDS, attention_mask=mask).logits[mask.bool()] for model in (eager, ours))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    how = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 12}
    want = eager.generate(IDS, **how)
    assert len(set(want[:, IDS.shape[1] :].flatten().tolist())) > 3  # or the texts would say little
    assert torch.equal(want, ours.generate(IDS, **how))
    assert torch.equal(want, ours.generate(IDS, past_key_values=compat.PagedCache(ours.config), **how))
    assert torch.equal(want, ours.generate(IDS, cache_implementation="static", **how))


def test_what_torch_cannot_stand_in_for_is_said() -> None:
    """With gradients, torch's own attention takes over, which would leave out the sinks without a word."""
    model = made("sinks, window", "lanewise")
    with pytest.raises(ValueError, match=r'with sinks, .*gradients.* needs attn_implementation="eager"'):
        model(IDS)
    plain = made("plain", "lanewise")
    plain(IDS).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())


@pytest.mark.parametrize("name", ["sinks", "indices", "block_indices"])
def test_arguments_that_would_be_passed_over_are_refused(name: str) -> None:
    module = made("plain", "lanewise").model.layers[0].self_attn
    q, kv = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 3, 16)
    attend = transformers.AttentionInterface()["lanewise"]
    assert attend(module, q, kv, kv, None, **{name: None})[0].shape == (1, 1, 4, 16)
    with pytest.raises(ValueError, match=f"attention with {name} needs"):
        attend(module, q, kv, kv, None, **{name: torch.zeros(1, dtype=torch.int64)})
