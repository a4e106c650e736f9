"""cpu_attention_with_kv_cache and its kin against vLLM's compiled ones, each over a cache it has written itself."""

import numpy as np
import pytest
import torch
import vllm._custom_ops as theirs
from torch.nn.functional import pad

import lanewise
from lanewise.compat import vllm as ours

BLOCK, BLOCKS, DIM = 32, 16, 64
# float32 sums in another order; the 16-bit dtypes are rounded once at the end, and vLLM rounds probabilities too
BOUNDS = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Step:
    """Sequences in the middle of a prompt and while decoding: the tables, and keys and values of a layer."""

    def __init__(self, dtype, heads=4, kv_heads=2, lengths=(70, 33, 5, 1), new=(3, 1, 5, 1)):
        generator = torch.Generator().manual_seed(0)
        self.dtype, self.heads, self.kv_heads = dtype, heads, kv_heads
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
        self.table = torch.randperm(BLOCKS, generator=generator)[: 4 * len(lengths)].view(-1, 4).int()
        at = [torch.arange(length) for length in lengths]
        slots = [row[i // BLOCK].long() * BLOCK + i % BLOCK for row, i in zip(self.table, at, strict=True)]
        self.slots = torch.cat(slots)
        tokens = len(self.slots)
        self.key, self.value = (torch.randn(tokens, kv_heads, DIM, generator=generator).to(dtype) for _ in range(2))
        self.query = (torch.randn(sum(new), heads, DIM, generator=generator)).to(dtype)
        self.slopes, self.sinks = (torch.rand(heads, generator=generator) for _ in range(2))

    def metadata(self, of, causal=True, window=-1):
        told = self.heads, self.kv_heads, DIM, self.lengths, self.dtype, self.starts, causal, window, "vec", True
        return of.cpu_attn_get_scheduler_metadata(len(self.lengths), *told)

    def caches(self, of):
        """As vLLM's backend cuts them out of one tensor."""
        keys, values = torch.zeros(BLOCKS, self.kv_heads, 2 * BLOCK, DIM, dtype=self.dtype).chunk(2, dim=2)
        of.cpu_attn_reshape_and_cache(self.key, self.value, keys, values, self.slots, "vec")
        return keys, values

    def run(self, of, caches, metadata, causal=True, window=-1, *, table=None, **how):
        changes = {"alibi_slopes": None, "softcap": 0.0, "s_aux": None} | how
        changes |= {"sliding_window": window, "block_table": self.table if table is None else table}
        output = torch.full_like(self.query, torch.nan)
        told = self.query, *caches, output, self.starts, self.lengths, 0.25, causal
        assert of.cpu_attention_with_kv_cache(*told, scheduler_metadata=metadata, **changes) is None
        return output

    def compare(self, causal=True, window=-1, **how):
        found, expected = (
            self.run(of, self.caches(of), self.metadata(of, causal, window), causal, window, **how)
            for of in (ours, theirs)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=BOUNDS[self.dtype])
        return found


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 1, 2, 7, 40])
def test_what_is_seen(dtype, causal, window):
    Step(dtype).compare(causal, window)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("how", ["softcap", "alibi_slopes", "s_aux", "all"])
def test_how_scores_are_changed(dtype, how):
    step = Step(dtype)
    changes = {"softcap": 2.0, "alibi_slopes": step.slopes, "s_aux": step.sinks}
    chosen = changes if how == "all" else {how: changes[how]}
    assert not torch.equal(step.compare(**chosen), step.compare())


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (12, 2), (8, 1)])
def test_groups_of_heads(heads, kv_heads):
    Step(torch.float32, heads, kv_heads).compare()


def test_sinks_in_bfloat16_and_decoding_alone():
    step = Step(torch.bfloat16, lengths=(100, 64, 1), new=(1, 1, 1))
    step.compare(s_aux=step.sinks.bfloat16())


def test_a_step_is_planned_once_for_all_layers_that_are_alike():
    step = Step(torch.float32)
    metadata, caches = step.metadata(ours), step.caches(ours)
    first = step.run(ours, caches, metadata)
    assert torch.equal(first, step.run(ours, caches, metadata))
    assert len(metadata.plans) == 1
    step.run(ours, caches, metadata, window=7)
    assert len(metadata.plans) == 2
    table = step.table.clone()
    table[0, 0] = step.table[3, 0]  # in place: another table in the same memory
    changed = step.run(ours, caches, metadata, table=table)
    assert len(metadata.plans) == 3
    assert not torch.equal(changed, first)
    table[:] = step.table
    assert torch.equal(step.run(ours, caches, metadata, table=table), first)
    assert len(metadata.plans) == 3


def test_rows_behind_the_planned_are_left_alone():
    """Tensors padded to a fixed size, as for a graph."""
    step = Step(torch.float16)
    expected = step.compare()
    metadata = step.metadata(ours)
    step.query = pad(step.query, (0, 0, 0, 0, 0, 2), value=torch.nan)
    step.lengths, step.table = pad(step.lengths, (0, 2)), pad(step.table, (0, 0, 0, 2))
    step.starts = pad(step.starts, (0, 2), value=int(step.starts[-1]))
    output = step.run(ours, step.caches(ours), metadata)
    assert torch.equal(output[:-2], expected)
    assert output[-2:].isnan().all()


@pytest.mark.parametrize("causal", [True, False])
def test_a_step_of_nobody(causal):
    nobody = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    metadata = ours.cpu_attn_get_scheduler_metadata(
        0, 4, 2, DIM, nobody[0], torch.float32, nobody[1], causal, 3, "vec", True
    )
    caches, output = torch.zeros(2, BLOCKS, 2, BLOCK, DIM), torch.zeros(0, 4, DIM)
    told = nobody[1], nobody[0], 1.0, causal, None, 3, torch.zeros(0, 4, dtype=torch.int32), 0.0, metadata, None
    ours.cpu_attention_with_kv_cache(output, *caches, output, *told)


def test_one_answer_for_all_in_dynamic_causal():
    step = Step(torch.float32)
    metadata, caches = step.metadata(ours), step.caches(ours)
    for causal in (True, False):
        found = step.run(ours, caches, metadata, False, dynamic_causal=torch.full((4,), causal))
        assert torch.equal(found, step.run(ours, caches, metadata, causal))
    with pytest.raises(NotImplementedError, match="dynamic_causal"):
        step.run(ours, caches, metadata, False, dynamic_causal=torch.tensor([True, True, False, True]))


def test_the_bits_are_lanewises():
    step = Step(torch.float32)
    keys, values = step.caches(ours)
    found = step.run(ours, (keys, values), step.metadata(ours))
    expected = lanewise.extend_attention(step.query, keys, values, step.table, step.lengths, step.starts, scale=0.25)
    assert torch.equal(found, torch.from_numpy(expected))


def test_an_int8_cache_has_a_scale_a_row():
    """lanewise's own, under vLLM's names: k_scale and v_scale are what append_kv writes scales and zeros to."""
    step = Step(torch.float32)
    caches = torch.zeros(2, BLOCKS, step.kv_heads, BLOCK, DIM, dtype=torch.int8)
    scales = torch.zeros(2, BLOCKS, step.kv_heads, BLOCK, 2)
    told = {"k_scale": scales[0], "v_scale": scales[1], "kv_cache_dtype": "int8"}
    ours.cpu_attn_reshape_and_cache(step.key, step.value, *caches, step.slots, "vec", **told)
    found = step.run(ours, caches, step.metadata(ours), **told)
    torch.testing.assert_close(found, step.compare(), rtol=0, atol=0.05)
    expected = lanewise.extend_attention(
        *(step.query, *caches, step.table, step.lengths, step.starts),
        scale=0.25,
        k_scales=scales[0],
        v_scales=scales[1],
    )
    assert torch.equal(found, torch.from_numpy(expected))


def test_errors():
    step = Step(torch.float32)
    caches, metadata = step.caches(ours), step.metadata(ours)
    with pytest.raises(TypeError, match="scheduler_metadata must come from lanewise's"):
        step.run(ours, caches, step.metadata(theirs))
    with pytest.raises(NotImplementedError, match="fp8"):
        step.run(ours, caches, metadata, kv_cache_dtype="fp8")
    with pytest.raises(NotImplementedError, match=r"k_scale must be 1\.0"):
        step.run(ours, caches, metadata, k_scale=0.5)
    table = step.table.clone()
    table[1, 1] = BLOCKS
    with pytest.raises(ValueError, match=r"block_table\[1, 1\]"):
        step.run(ours, caches, metadata, table=table)
    step.lengths[2] += 1
    with pytest.raises(ValueError, match="seq_lens must be that of scheduler_metadata"):
        step.run(ours, caches, metadata)
