"Losses and means of numbers in half precision: PyTorch's own in float64 from the same numbers, and no overflow."

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from annotated_nlp.compressing import distillation_loss, relation_loss
from annotated_nlp.electra import Judged, electra_loss
from annotated_nlp.parts.pooling import mean_pool
from annotated_nlp.probing import preferences
from annotated_nlp.sentences import contrastive_loss, quick_thought_loss
from annotated_nlp.seq2seq import cross_entropy
from annotated_nlp.vectors import negative_sampling_loss
from annotated_nlp.vit import hard_distillation, soft_distillation

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
IDS = torch.arange(24).unflatten(0, (4, 6)) % 7
REAL = torch.arange(6) < torch.tensor([[6], [4], [1], [6]])


def kl(student, teacher, T):
    return T**2 * F.kl_div((student / T).log_softmax(-1), (teacher / T).log_softmax(-1), reduction="batchmean", log_target=True)


def relations(*maps):
    "Wang et al. 2020, equations 5 to 8, head by head and query by query."
    far, n = 0.0, 0
    for b, row in enumerate(REAL):
        n += int(row.sum()) * 2
        for h in range(2):
            for left, right in ((0, 1), (2, 2)):
                student, teacher = ((one[left][b, h] @ one[right][b, h].T * one[0].shape[-1] ** -0.5)[row][:, row] for one in maps)
                far += F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="sum")
    return far / n


def neighbours(x, y):
    scores = (x @ y.T).fill_diagonal_(-torch.inf)
    beside = torch.zeros_like(scores)
    for i in range(len(x)):
        beside[i, [j for j in (i - 1, i + 1) if 0 <= j < len(x)]] = 1
    beside /= beside.sum(1, keepdim=True)
    return -(beside * scores.log_softmax(1).nan_to_num(neginf=0.0)).sum(1).mean()


def rtd(logits, pieces):
    each = F.binary_cross_entropy_with_logits(logits, (IDS > 2).to(logits), reduction="none")
    return F.cross_entropy(pieces, IDS[REAL]) + 50 * each[REAL].mean()


def both(heads, weight, second):
    return (1 - weight) * F.cross_entropy(heads[0], torch.tensor([1, 0, 2, 3])) + weight * second


# our loss, PyTorch's, and the shapes of what both take
LOSSES = {
    "distillation at 1": (lambda s, t: distillation_loss(s, t, 1), lambda s, t: kl(s, t, 1), [(4, 9), (4, 9)]),
    "distillation at 10": (lambda s, t: distillation_loss(s, t, 10), lambda s, t: kl(s, t, 10), [(4, 9), (4, 9)]),
    "distillation at 20": (lambda s, t: distillation_loss(s, t, 20), lambda s, t: kl(s, t, 20), [(4, 9), (4, 9)]),
    "relations": (lambda *x: relation_loss(x[:3], x[3:], REAL), lambda *x: relations(x[:3], x[3:]), [(4, 2, 6, 3)] * 6),
    "cross-entropy": (lambda x: cross_entropy(x, IDS, REAL), lambda x: F.cross_entropy(x[REAL], IDS[REAL]), [(4, 6, 9)]),
    "discriminator": (lambda x, y: electra_loss(IDS, REAL, Judged(y, IDS, IDS > 2, x), REAL).total, rtd, [(4, 6), (int(REAL.sum()), 9)]),
    "negative samples": (negative_sampling_loss, lambda x: -(x[:, 0].sigmoid().log() + (1 - x[:, 1:].sigmoid()).log().sum(1)).mean(), [(4, 6)]),
    "contrast": (contrastive_loss, lambda x, y: F.cross_entropy(F.cosine_similarity(x[:, None], y[None], -1) / 0.05, torch.arange(4)), [(4, 6)] * 2),
    "neighbours": (quick_thought_loss, neighbours, [(4, 6)] * 2),
    "preferences": (lambda x: preferences(x, IDS).sum(), lambda x: x.log_softmax(-1).gather(1, IDS).sum(), [(4, 9)]),
    "soft distillation": (lambda x, y, t: soft_distillation((x, y), torch.tensor([1, 0, 2, 3]), t),
                          lambda x, y, t: both([x], 0.1, kl(y, t, 3.0)), [(4, 9)] * 3),
    "hard distillation": (lambda x, y, t: hard_distillation((x, y), torch.tensor([1, 0, 2, 3]), t),
                          lambda x, y, t: both([x], 0.5, F.cross_entropy(y, t.argmax(1))), [(4, 9)] * 3),
}


@HALVES
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_computed_in_float32(name, dtype):
    ours, theirs, shapes = LOSSES[name]
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=g).mul(3).to(dtype).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in given]
    loss, wanted = ours(*given), theirs(*exact)
    assert loss.dtype == torch.float32
    assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    for x, y in zip(given, exact):
        (want,), (got,) = (torch.autograd.grad(end, one, retain_graph=True, allow_unused=True) for end, one in ((wanted, y), (loss, x)))
        if got is not None:  # a teacher gets none
            assert_close(got, want.to(dtype), rtol=torch.finfo(dtype).eps * 2, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", [lambda s, t: distillation_loss(s, t, 2.0), lambda s, t: soft_distillation((s, s), torch.zeros(4, dtype=torch.long), t, 2.0, 1.0)])
def test_what_a_teacher_rules_out_costs_nothing(loss, dtype):
    "A class of probability 0 has no part in the divergence, whatever the student says of it, -inf included."
    g = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(4, 5, generator=g).to(dtype) for _ in range(2))
    teacher[:, 3] = -torch.inf
    student.requires_grad_()
    value = loss(student, teacher)
    want = 4.0 * F.kl_div((student.double() / 2).log_softmax(-1), (teacher.double() / 2).softmax(-1), reduction="batchmean")
    assert_close(value.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(value, student)[0].isfinite().all()
    without = student.detach().clone()
    without[:, 3] = -torch.inf
    assert_close(loss(without, teacher), loss(student.detach()[:, [0, 1, 2, 4]], teacher[:, [0, 1, 2, 4]]), rtol=1e-5, atol=1e-6)


def test_relations_of_nothing_real_are_zero():
    heads = [torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3)]
    other = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    loss = relation_loss(heads, other, torch.zeros(2, 5, dtype=torch.bool))
    loss.backward()
    assert loss == 0 and all(x.grad.abs().sum() == 0 for x in heads)


@HALVES
def test_means_do_not_overflow(dtype):
    "300 times 1,000 is beyond float16; so is the loss of a thousand wrong judgements."
    states = torch.full((2, 300, 3), 1000.0, dtype=dtype)
    assert_close(mean_pool(states, torch.ones(2, 300, dtype=torch.bool)), states[:, 0])
    g = torch.Generator().manual_seed(0)
    states, mask = torch.randn(2, 50, 8, generator=g).to(dtype), torch.arange(50) < torch.tensor([[50], [7]])
    wanted = torch.stack([row[real].double().mean(0) for row, real in zip(states, mask)])
    assert_close(mean_pool(states, mask), wanted.to(dtype), rtol=0, atol=0)
    ids, no = torch.zeros(2, 600, dtype=torch.long), torch.zeros(2, 600, dtype=torch.bool)
    judged = Judged(torch.zeros(0, 9, dtype=dtype), ids, no, torch.full((2, 600), 100.0, dtype=dtype))
    assert electra_loss(ids, no, judged).rtd == 100


@pytest.mark.parametrize("gated", [False, True])
def test_t5_in_float16_does_not_overflow(gated, tmp_path):
    "A feed-forward sum beyond 65,504: transformers keeps it in float32, and so do we. Both are near float64."
    import transformers

    from annotated_nlp.t5 import T5

    torch.manual_seed(0)
    sizes = dict(vocab_size=40, d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=3, dropout_rate=0.0, decoder_start_token_id=0)
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, feed_forward_proj="gated-gelu" if gated else "relu")).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if name.endswith("wo.weight"):
                p.mul_(30_000)
    theirs.save_pretrained(tmp_path)
    src, tgt = torch.randint(2, 40, (2, 7)), torch.randint(2, 40, (2, 5))
    load = transformers.T5ForConditionalGeneration.from_pretrained
    with torch.no_grad():
        exact = load(tmp_path, dtype=torch.float64).eval()(input_ids=src, decoder_input_ids=tgt, output_hidden_states=True)
        assert max(x.abs().max() for x in exact.encoder_hidden_states) > 65_504
        half = load(tmp_path, dtype=torch.float16).eval()(input_ids=src, decoder_input_ids=tgt).logits
        ours = T5.from_pretrained(tmp_path, dtype=torch.float16)(src, tgt)
    assert ours.dtype == torch.float16 and ours.isfinite().all()
    wrong = (half.double() - exact.logits).abs().max()
    assert (ours.double() - exact.logits).abs().max() < 2 * wrong
