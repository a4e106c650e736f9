# cython: language_level=3, freethreading_compatible=True
"""Several sequences, or several tokens, at once: a step of beam search, and drafts verified."""
cimport numpy as cnp
from libc.float cimport DBL_MAX
from libc.math cimport INFINITY
from libc.stdint cimport INT64_MAX, UINT32_MAX, int64_t
from libc.string cimport memset

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lanewise._arguments cimport check_on_invalid, fill_integers, integer, is_sparse, number, ties_of_steps
from lanewise._arrays cimport as_array, logits_rows, rows_span, rows_t, whole
from lanewise._ops cimport *
from lanewise._settings cimport draw, fill_edits, fill_numbers, fill_steps, from_params
from lanewise.errors import REASON, InvalidLogitsError
from lanewise.params import SamplingParams
from lanewise.values import scale

cnp.import_array()


class BeamStep(NamedTuple):
    """The best continuations of each group, best first; -inf and -1 behind them where there are fewer."""

    scores: np.ndarray  # float64 (G, n)
    beams: np.ndarray  # int64 (G, n): which of its group's beams it continues
    tokens: np.ndarray  # int64 (G, n)
    perturbed: np.ndarray | None  # float64 (G, n): what stochastic beams are ordered by


class Verified(NamedTuple):
    """How far the target follows each sequence's drafts; without the B axis for one sequence."""

    tokens: np.ndarray  # int64 (B, n + 1): the drafts that stand and the token behind them, then -1
    accepted: np.ndarray | int  # int64 (B,): how many drafts stand
    path: np.ndarray  # int64 (B, n): the numbers of those drafts, then -1


METHODS = {"noise": DRAFT_NOISE, "ratio": DRAFT_RATIO, "block": DRAFT_BLOCK, "typical": DRAFT_TYPICAL}
THRESHOLDS = {"ratio": (1.0, 1.0), "typical": (0.09, 0.3)}
PROBS_REASON = "a NaN, an infinity or a negative among the probabilities looked at, or nothing above 0"


# ---- beams ----


cdef object scores_of(object scores, str name, tuple shape):
    array = np.array(as_array(scores, name), np.float64, order="C")
    if shape is None:
        if array.ndim not in (1, 2) or array.size == 0:
            raise ValueError(f"{name} must have shape (beams,) or (G, beams), got {array.shape}")
    elif array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    bad = ~(array < np.inf)
    if bad.any():
        at = tuple(np.argwhere(bad)[0].tolist())
        raise ValueError(f"{name}{list(at)} is {array[at]}; it must be a number or -inf")
    return array


def beam_step(scores, logits, *, n=None, groups=1, eos_ids=(), diversity_penalty=0.0, perturbed=None,
              repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, prompt_ids=None, output_ids=None,
              bias=None, mask=None, seed=None, step=None, keys=None, vocab_size=None, on_invalid="raise"):
    """The n best continuations of each group of beams: scores (G, beams), logits (G * beams, V), a BeamStep of (G, n).

    A continuation scores the beam's score + log_softmax; ties go to the lowest beam, then id; a beam of -inf is not
    looked at. n: (1 + max(1, len(eos_ids))) * beams, so that at least `beams` of them go on. Penalties, bias and mask
    are sample's, one row a beam, and come before log_softmax. groups: so many groups in a row are one search, and each
    is charged `diversity_penalty` for each beam of those before it that goes on with the same token.
    perturbed (G, beams): stochastic beams, with the noise of seed, step and keys (one a beam). scores may be (beams,).
    A NaN or +inf among a live beam's logits: InvalidLogitsError, or NaN and -1 with on_invalid="mark".
    Raises ValueError, TypeError.

    >>> logits = np.log(np.float32([[0.1, 0.2, 0.7], [0.1, 0.1, 0.8]]))
    >>> found = lanewise.beam_step([-1.0, -1.5], logits, n=2)
    >>> found.beams.tolist(), found.tokens.tolist(), found.scores.round(2).tolist()
    ([0, 1], [2, 2], [-1.36, -1.72])
    """
    cdef rows_t r
    cdef beam_args a
    cdef sample_args edits
    cdef int64_t count
    cdef tuple shape
    memset(&a, 0, sizeof(a))
    memset(&edits, 0, sizeof(edits))
    check_on_invalid(on_invalid)
    sums = scores_of(scores, "scores", None)
    single = sums.ndim == 1
    a.beams, count = sums.shape[sums.ndim - 1], sums.shape[0] if not single else 1
    a.groups = integer(groups, "groups", 1, BEAM_LIMIT)
    owner = logits_rows(logits, &r, "logits")
    if vocab_size is not None:
        r.cols = integer(vocab_size, "vocab_size", 1, r.cols)
    if r.cols > SAMPLE_MAX_VOCAB:
        raise ValueError(f"logits may have up to {SAMPLE_MAX_VOCAB} ids a row, got {r.cols}")
    if r.single or r.rows != count * a.beams:
        raise ValueError(f"logits must have a row for each of {count} x {a.beams} scores, got shape {owner.shape}")
    if count % a.groups:
        raise ValueError(f"groups is {groups}, which does not divide the {count} groups of scores")
    if a.groups * a.beams > BEAM_LIMIT:
        raise ValueError(f"a search may have up to {BEAM_LIMIT} beams, got {a.groups} x {a.beams}")
    ends = integers(eos_ids, "eos_ids")
    for id_ in ends.tolist():
        integer(id_, "eos_ids", 0, r.cols - 1)
    a.eos_ids, a.eos_count = whole(ends), len(ends)
    most = min(a.beams * r.cols, max(BEAM_LIMIT, r.cols))
    a.n = min((1 + max(1, len(ends))) * a.beams, most) if n is None else integer(n, "n", 1, most)
    a.diversity_penalty = number(diversity_penalty, "diversity_penalty", 0.0, DBL_MAX)
    rows_params = np.zeros((r.rows, sizeof(sample_params)), np.uint8)
    a.params = whole(rows_params)
    fill_numbers(<sample_params *>a.params.ptr, r.rows, 1.0, 0, 1.0, 0.0, 1, repetition_penalty, frequency_penalty,
                 presence_penalty)
    kept = fill_edits(&edits, &r, prompt_ids, output_ids, bias, mask)
    a.mask, a.mask_kind, a.mask_stride, a.mask_width = edits.mask, edits.mask_kind, edits.mask_stride, edits.mask_width
    a.bias_ids, a.bias_values, a.bias_offsets = edits.bias_ids, edits.bias_values, edits.bias_offsets
    a.bias_dense, a.bias_stride = edits.bias_dense, edits.bias_stride
    a.prompt_ids, a.prompt_offsets = edits.prompt_ids, edits.prompt_offsets
    a.output_ids, a.output_offsets = edits.output_ids, edits.output_offsets
    a.x, a.scores, a.cols, a.dtype, a.x_stride = rows_span(&r), whole(sums), r.cols, r.dtype, r.stride
    a.rows, a.force_exact = count // a.groups, force_exact()
    shape = (count, a.n)[single:]
    found = BeamStep(np.empty(shape), np.empty(shape, np.int64), np.empty(shape, np.int64),
                     None if perturbed is None else np.empty(shape))
    a.to_scores, a.to_beams, a.to_tokens = whole(found.scores), whole(found.beams), whole(found.tokens)
    if perturbed is None:
        if not (seed is None and step is None and keys is None):
            raise ValueError("seed, step and keys are for stochastic beams, which have perturbed scores")
        run(OP_beam_step, &a, r.cols, a.groups * a.beams * 2 * r.cols)
    else:
        noisy = scores_of(perturbed, "perturbed", sums.shape)
        a.perturbed, a.to_perturbed = whole(noisy), whole(found.perturbed)
        draw(OP_beam_step, &a, a.params.ptr, &r, a.groups * a.beams * 2 * r.cols, seed, step, keys, None, None)
    if on_invalid == "raise":
        invalid = np.flatnonzero(np.isnan(found.scores.reshape(count, -1)[:, 0])).tolist()
        if invalid:
            raise InvalidLogitsError(invalid, found, "a NaN or +inf among the logits of a beam")
    return found


# ---- drafts ----


cdef cnp.ndarray integers(object ids, str name):
    array = as_array(ids, name)
    if array.ndim == 1 and array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be one-dimensional integers, got {array.dtype} of shape {array.shape}")
    return np.array(np.minimum(array, INT64_MAX) if array.dtype == np.uint64 else array, np.int64)


# One int64 array a sequence; of a padded array, or with `counts`, as many as there are.
cdef list lists_of(object ids, str name, bint single, list counts):
    if single:
        return [integers(ids, name)]
    if not isinstance(ids, (list, tuple)):
        ids = as_array(ids, name)
        if ids.ndim != 2:
            raise ValueError(f"{name} must be a list of ids a sequence, or (B, n) padded with -1, got {ids.shape}")
        if counts is None:
            there = ids >= 0
            counts = there.sum(1).tolist()
            if (there != (np.arange(ids.shape[1]) < np.array(counts)[:, None])).any():
                raise ValueError(f"{name} must have its -1 behind all ids of a sequence")
    rows = [integers(row, f"{name}[{i}]") for i, row in enumerate(ids)]
    return rows if counts is None else [row[:count] for row, count in zip(rows, counts)]


# All ids one after the other, `width` a sequence or, if it is 0, as many as there are; where each sequence's begin, and
# how many there are, in starts.
cdef cnp.ndarray laid_out(list rows, str name, bint single, int64_t vocab, int64_t width, int64_t *starts):
    cdef cnp.npy_intp total = 0
    cdef int64_t i, j, at = 0, id_, count = len(rows)
    cdef cnp.ndarray row, ids
    for i in range(count):
        row = rows[i]
        starts[3 * i + 2] = cnp.PyArray_DIM(row, 0)
        total += width or starts[3 * i + 2]
    ids = cnp.PyArray_ZEROS(1, &total, cnp.NPY_INT64, 0)
    for i in range(count):
        row = rows[i]
        starts[3 * i + 1] = at
        for j in range(starts[3 * i + 2]):
            id_ = (<int64_t *>cnp.PyArray_DATA(row))[j]
            if not 0 <= id_ < vocab:
                where = f"{name}[{j}]" if single else f"{name}[{i}][{j}]"
                raise ValueError(f"{where} is {id_}, not an id in 0..{vocab - 1}")
            (<int64_t *>cnp.PyArray_DATA(ids))[at + j] = id_
        at += width or starts[3 * i + 2]
    return ids


cdef list parents_of(object parents, bint single, list drafts, bint distinct):
    rows = lists_of(parents, "parents", single, [len(row) for row in drafts])
    if [len(row) for row in rows] != [len(row) for row in drafts]:
        raise ValueError("parents must have one entry a draft")
    for i, row in enumerate(rows):
        where = "parents" if single else f"parents[{i}]"
        bad = np.flatnonzero((row < -1) | (row >= np.arange(len(row))))
        if bad.size:
            raise ValueError(f"{where}[{bad[0]}] is {row[bad[0]]}, not the number of a draft before it, or -1 for none")
        if distinct and len(set(zip(row.tolist(), drafts[i].tolist()))) < len(row):
            raise ValueError(f"{where}: drafts without q that follow the same must differ")
    return rows


# What sample is told of one sequence, for each of its places.
cdef object for_places(object given, list places):
    return [row for row, count in zip(given, places) for _ in range(count)]


cdef object histories(object output_ids, str name, bint single, list drafts, list parents, list places):
    rows = [integers(output_ids, name)] if single else lists_of(output_ids, name, False, None)
    if len(rows) != len(drafts):
        raise ValueError(f"{name} must have one list a sequence: {len(drafts)} sequences, got {len(rows)}")
    told = []
    for row, draft, parent, count in zip(rows, drafts, parents, places):
        mine = [row]
        for i, id_ in enumerate(draft.tolist()):
            mine.append(np.append(mine[i if parent is None else parent[i] + 1], id_))
        told += mine + [row] * (count - len(mine))
    return told


cdef object float_rows(object x, rows_t *r, str name):
    owner = logits_rows(x, r, name)
    if r.dtype != DTYPE_F32:
        owner = logits_rows(scale(x, 1.0), r, name)
    return owner


cdef object flat(object x, str name, int64_t rows, int64_t width):
    x = as_array(x, name)
    if x.ndim == 3:
        if x.shape[:2] != (rows, width):
            raise ValueError(f"{name} must have shape ({rows}, {width}, V), got {x.shape}")
        x = x.reshape(rows * width, x.shape[2])
    return x


cdef object prompts_of(object prompt_ids, bint single, list places):
    rows = [integers(prompt_ids, "prompt_ids")] if single else lists_of(prompt_ids, "prompt_ids", False, None)
    if len(rows) != len(places):
        raise ValueError(f"prompt_ids must have one list a sequence: {len(places)} sequences, got {len(rows)}")
    return for_places(rows, places)


cdef object biases_of(object bias, list places):
    if isinstance(bias, Mapping):
        return bias
    if is_sparse(bias) or as_array(bias, "bias").ndim == 2:
        if len(bias) != len(places):
            raise ValueError(f"bias must have one row a sequence: {len(places)} sequences, got {len(bias)}")
        told = for_places(bias, places)
        return told if is_sparse(bias) else np.stack([as_array(row, "bias") for row in told])
    return bias


def verify_draft(target, draft, params=None, *, q=None, method="noise", probs=False, parents=None, temperature=1.0,
                 top_k=0, top_p=1.0, min_p=0.0, min_keep=1, repetition_penalty=1.0, frequency_penalty=0.0,
                 presence_penalty=0.0, prompt_ids=None, output_ids=None, bias=None, mask=None, seed=None, step=None,
                 keys=None, u=None, thresholds=None, vocab_size=None, ties="lowest", preset="transformers",
                 on_invalid="raise"):
    """How many drafts the target follows, and the token behind them: Verified(tokens, accepted, path).

    target (n + 1, V) with draft (n,); or (B, n + 1, V) with (B, n), padded with -1 where a sequence has fewer; or, with
    a list of ids a sequence, (N + B, V), n + 1 rows a sequence. Logits with the numbers of sample, one or one a sequence,
    or with probs=True probabilities. Row 0 follows the text, row i + 1 follows draft i.
    method: "noise": sample's own draws, the text is that of plain decoding; "ratio": u < p / q, and what is left of p;
    "block": all of a chain at once; "typical": thresholds (epsilon, alpha). q: what each draft was drawn from, (n, V),
    (B, n, V) or (N, V) probabilities; without it a draft is certain. parents: of a tree, the number of the draft that
    each follows, -1 for none. seed, step (of the first place) and keys as in sample, or u: one number a place.
    thresholds of a tree without q: (of one draft, of the sum). Rows that cannot be chosen from: InvalidLogitsError, or
    -1 with on_invalid="mark". Raises ValueError, TypeError.

    >>> target = np.log(np.float32([[0.1, 0.2, 0.7], [0.6, 0.2, 0.2]]))
    >>> lanewise.verify_draft(target, [2], temperature=0.0).tokens
    array([2, 0])
    """
    cdef rows_t r, own, rows_q
    cdef draft_args a
    cdef sample_args edits
    cdef cnp.npy_intp shape[2]
    cdef int64_t i, count, most = 0, every = 0
    cdef int64_t *at
    cdef list tree = None
    cdef tuple wanted
    memset(&a, 0, sizeof(a))
    memset(&edits, 0, sizeof(edits))
    check_on_invalid(on_invalid)
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    a.method, a.of_probs = METHODS[method], bool(probs)
    a.ties_all, a.force_exact = ties_of_steps(ties), force_exact()
    fill_steps(a.steps, preset)
    x = as_array(target, "target")
    nested = x.ndim == 2 and isinstance(draft, (list, tuple)) and any([not is_number(row) for row in draft])
    single = x.ndim == 2 and not nested
    if x.ndim not in (2, 3):
        raise ValueError(f"target must have shape (n + 1, V), (B, n + 1, V) or (N + B, V), got {x.shape}")
    drafts = lists_of(draft, "draft", single, None)
    count = len(drafts)
    for row in drafts:
        most = max(most, cnp.PyArray_DIM(<cnp.ndarray>row, 0))
        every += cnp.PyArray_DIM(<cnp.ndarray>row, 0)
    if x.ndim == 3:
        a.width, nested = x.shape[1], False
        if count != x.shape[0] or most >= a.width:
            raise ValueError(f"target has {x.shape[0]} sequences of up to {a.width - 1} drafts, "
                             f"draft has {count} of up to {most}")
        owner = x.reshape(-1, x.shape[2]) if x.shape[2] else x
    else:
        a.width, owner = most + 1, x
        if every + count != x.shape[0]:
            raise ValueError(f"target must have a row more than a sequence has drafts, {every + count} in all, "
                             f"got {x.shape[0]}")
    owner = float_rows(owner, &r, "target") if probs else logits_rows(owner, &r, "target")
    if vocab_size is not None:
        r.cols = integer(vocab_size, "vocab_size", 1, r.cols)
    if r.cols > SAMPLE_MAX_VOCAB:
        raise ValueError(f"target may have up to {SAMPLE_MAX_VOCAB} ids a row, got {r.cols}")
    if every > SAMPLE_MAX_VOCAB:
        raise ValueError(f"draft may have up to {SAMPLE_MAX_VOCAB} ids in all, got {every}")
    own = r
    own.rows, own.single = count, single
    shape[0], shape[1] = count, 3
    starts = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT64, 0)
    a.starts = whole(starts)
    at = <int64_t *>a.starts.ptr
    ids = laid_out(drafts, "draft", single, r.cols, a.width - 1 if x.ndim == 3 else 0, at)
    kept = [ids]
    for i in range(count):  # each sequence's places stand behind those of the ones before it
        at[3 * i] = i * a.width if x.ndim == 3 else at[3 * i + 1] + i
    if q is not None:
        if method not in ("ratio", "block"):
            raise ValueError(f"q is for method 'ratio' or 'block', not {method!r}")
        q = flat(q, "q", count, a.width - 1)
        if every:
            if q.ndim != 2 or q.shape[0] != len(ids) or q.shape[1] < r.cols:
                raise ValueError(f"q must have a row of {r.cols} for each of {len(ids)} drafts, got shape {q.shape}")
            kept.append(float_rows(q, &rows_q, "q"))
            a.q, a.q_stride = rows_span(&rows_q), rows_q.stride
    if parents is not None:
        if method not in ("noise", "ratio"):
            raise ValueError(f"a tree is for method 'noise' or 'ratio', not {method!r}")
        tree = parents_of(parents, single, drafts, method == "ratio" and q is None)
        above = np.zeros(len(ids), np.int64)
        for i in range(count):
            above[at[3 * i + 1]:at[3 * i + 1] + at[3 * i + 2]] = tree[i]
        a.parents = whole(above)
        kept.append(above)
    numbers = [temperature, top_k, top_p, min_p, min_keep, repetition_penalty, frequency_penalty, presence_penalty]
    told = [edit is not None for edit in (prompt_ids, output_ids, bias, mask)]
    if probs:
        if params is not None or numbers != NEUTRAL or any(told):
            raise ValueError("probs=True takes the target as it is: what sample is told of logits does not go with it")
        if method == "typical":
            raise ValueError("method 'typical' is for logits")
    if params is not None:
        numbers = from_params(params, numbers, count)
    rows_params = np.zeros((count, sizeof(sample_params)), np.uint8)
    a.params = whole(rows_params)
    (temperature, top_k, top_p, min_p, min_keep, repetition_penalty, frequency_penalty, presence_penalty) = numbers
    fill_numbers(<sample_params *>a.params.ptr, len(drafts), temperature, top_k, top_p, min_p, min_keep,
                 repetition_penalty, frequency_penalty, presence_penalty)
    r.single = False
    if any(told):
        places = [a.width if x.ndim == 3 else at[3 * i + 2] + 1 for i in range(count)]
        if prompt_ids is not None:
            prompt_ids = prompts_of(prompt_ids, single, places)
        if output_ids is not None:
            output_ids = histories(output_ids, "output_ids", single, drafts, tree or [None] * count, places)
        if bias is not None:
            bias = biases_of(bias, places)
        if mask is not None:
            mask = flat(mask, "mask", count, a.width)
        kept += fill_edits(&edits, &r, prompt_ids, output_ids, bias, mask)
    a.mask, a.mask_kind, a.mask_stride, a.mask_width = edits.mask, edits.mask_kind, edits.mask_stride, edits.mask_width
    a.bias_ids, a.bias_values, a.bias_offsets = edits.bias_ids, edits.bias_values, edits.bias_offsets
    a.bias_dense, a.bias_stride = edits.bias_dense, edits.bias_stride
    a.prompt_ids, a.prompt_offsets = edits.prompt_ids, edits.prompt_offsets
    a.output_ids, a.output_offsets = edits.output_ids, edits.output_offsets
    if u is not None:
        if seed is not None or step is not None or keys is not None:
            raise ValueError("seed, step and keys do not go with u")
        coins = np.array(as_array(u, "u"), np.float64, order="C")
        wanted = (count, a.width)
        if x.ndim == 2:
            wanted = (r.rows,)
        if coins.shape != wanted:
            raise ValueError(f"u must have shape {wanted}, one number a place, got {coins.shape}")
        bad = np.argwhere(~((coins >= 0) & (coins < 1)))
        if bad.size:
            raise ValueError(f"u{bad[0].tolist()} is {coins[tuple(bad[0])]}; it must be in [0, 1)")
        a.u = whole(coins)
    limits = thresholds
    if thresholds is None:
        limits = THRESHOLDS.get(method, (1.0, 1.0))
    elif method not in THRESHOLDS or q is not None:
        raise ValueError("thresholds are for method 'typical', or 'ratio' without q")
    first, second = limits
    a.limits[0], a.limits[1] = number(first, "thresholds[0]", 0.0, INFINITY), number(second, "thresholds[1]", 0.0, INFINITY)
    if step is not None:  # each place has its own
        steps = cnp.PyArray_EMPTY(1, shape, cnp.NPY_INT64, 0)
        fill_integers(cnp.PyArray_DATA(steps), sizeof(int64_t), count, step, "step", 0, UINT32_MAX - a.width + 1)
    accepted = cnp.PyArray_EMPTY(1, shape, cnp.NPY_INT64, 0)
    shape[1] = a.width
    tokens = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT64, 0)
    shape[1] = a.width - 1
    path = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT64, 0)
    a.x, a.rows, a.cols, a.dtype, a.x_stride = rows_span(&r), count, r.cols, r.dtype, r.stride
    a.draft, a.tokens, a.path, a.accepted = whole(ids), whole(tokens), whole(path), whole(accepted)
    draw(OP_verify_draft, &a, a.params.ptr, &own, a.width * r.cols, seed, step, keys, None, None)
    found = Verified(tokens[0], int(accepted[0]), path[0]) if single else Verified(tokens, accepted, path)
    if on_invalid == "raise":
        invalid = [i for i in range(count) if (<int64_t *>a.tokens.ptr)[i * a.width] < 0]
        if invalid:
            raise InvalidLogitsError(invalid, found, PROBS_REASON if probs else REASON)
    return found


NEUTRAL = [getattr(SamplingParams(), name) for name in ("temperature", "top_k", "top_p", "min_p", "min_keep",
                                                        "repetition_penalty", "frequency_penalty", "presence_penalty")]


cdef bint is_number(object x):
    return getattr(x, "ndim", 1) == 0 or isinstance(x, (int, float))
