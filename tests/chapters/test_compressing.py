"Compressing: closed forms, PyTorch's and scikit-learn's own answers, what is stored, and what must not change."

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from sklearn.cluster import KMeans
from torch import nn
from torch.nn.utils import prune as torch_prune

import test_invariants
from messages import refused
from parity import close
from annotated_nlp.compressing import Factors, Integers, codebook, distillation_loss
from annotated_nlp.compressing import factorize, fit_levels, grid, nearest_level, prune, quantize
from annotated_nlp.compressing import relation_loss, rewind, straight_through
from annotated_nlp.gpt import GPT, GPTConfig
from annotated_nlp.hub.compressed import COMPRESSED, load_compressed, save_compressed
from annotated_nlp.parts.compact import hold, layers, n_bytes, pack_bits, release
from annotated_nlp.parts.compact import unpack_bits
from annotated_nlp.parts.heads import gates, head_importance, remove_heads

unchecked = test_invariants.unchecked
SIZES = dict(vocab_size=40, d_model=24, n_heads=3, n_layers=2, max_len=32, dropout=0.0)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def gpt(**changes):
    model = GPT(GPTConfig(**SIZES | changes)).eval()
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.3)
    return model


def ids():
    return torch.randint(40, (3, 7))


@pytest.mark.parametrize("temperature", [0.5, 1, 4])
def test_distillation_is_kl(temperature):
    student, teacher = torch.randn(2, 5, 7, requires_grad=True), torch.randn(2, 5, 7, requires_grad=True)
    T = temperature
    flat = student.flatten(0, 1), teacher.flatten(0, 1)
    theirs = T**2 * F.kl_div((flat[0] / T).log_softmax(-1), (flat[1] / T).softmax(-1).detach(), reduction="batchmean")
    ours = distillation_loss(student, teacher, T)
    close(ours, theirs)
    close(*(torch.autograd.grad(loss, student)[0] for loss in (ours, theirs)))
    assert not ours.requires_grad or teacher.grad is None


def test_relations_vanish_for_the_teacher_itself_and_ignore_padding():
    heads = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    assert relation_loss(heads, heads, mask).abs() < 1e-6
    other = [torch.randn(2, 3, 5, 2) for _ in range(3)]
    before = relation_loss(other, heads, mask)
    for x in (*other, *heads):
        x[1, :, 3:] = 100
    close(relation_loss(other, heads, mask), before)
    assert before > 0.01


def test_eight_bits_are_pytorchs():
    weight = torch.randn(6, 20)
    ours = Integers.of(weight)
    scale = weight.abs().amax(1) / 127
    theirs = torch.fake_quantize_per_channel_affine(weight, scale, torch.zeros(6, dtype=torch.int32), 0, -127, 127)
    close(ours.dense(), theirs)
    assert ours.codes.dtype == torch.int8


@pytest.mark.parametrize("shape", [(20,), (1, 20), (2, 3, 20)])
def test_integer_product(shape):
    "As the rounded matrix times the rounded vector; with a gradient as if nothing were rounded in x."
    weight, bias, x = torch.randn(6, 20), torch.randn(6), torch.randn(shape)
    ints = Integers.of(weight)
    step = x.abs().amax(-1, keepdim=True) / 127
    wanted = F.linear((x / step).round() * step, ints.dense(), bias)
    with torch.no_grad():
        assert ints.product(x, bias).shape == wanted.shape
        close(ints.product(x, bias), wanted, 1e-5)
        close(ints.product(x), wanted - bias, 1e-5)
        assert not ints.product(torch.zeros(shape)).any()
    x.requires_grad_()
    y = ints.product(x, bias)
    close(y.detach(), wanted, 1e-5)
    (slope,) = torch.autograd.grad(y.sum(), x)
    close(slope, ints.dense().sum(0).expand(shape))


@pytest.mark.parametrize("shape", [(1, 64), (1, 1, 64), (2, 1, 64), (2, 3, 64)])
def test_integer_layer_compiled(shape, unchecked):
    "As by itself; a single row in three dimensions is what a step of generation has, and what PyTorch once misread."
    torch.compiler.reset()
    layer, x = quantize(nn.Sequential(nn.Linear(64, 96))), torch.randn(shape)
    with torch.no_grad():
        close(torch.compile(layer)(x), layer(x), 1e-5)


@pytest.mark.parametrize("shape", [(768, 2304), (768, 768), (3072, 768)])
def test_integer_layer_beside_pytorchs(shape):
    "As near to the exact layer as PyTorch's own dynamically quantised one, which gives its inputs one bit less."
    ao, n_in = torch.ao.quantization, shape[0]
    exact, x = nn.Linear(*shape), torch.randn(4, n_in)
    ours = quantize(nn.Sequential(copy.deepcopy(exact)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = ao.quantize_dynamic(nn.Sequential(copy.deepcopy(exact)), {nn.Linear: ao.per_channel_dynamic_qconfig})
    with torch.no_grad():
        wanted = exact(x)
        far = {name: (layer(x) - wanted).norm() / wanted.norm() for name, layer in dict(ours=ours, theirs=theirs).items()}
    assert 0 < far["ours"] < 0.01
    assert far["ours"] <= far["theirs"] < 0.03


def test_one_bit_is_sign_and_mean():
    weight = torch.randn(6, 32)
    codes, scale = fit_levels(weight, grid(1), rounds=1)
    close(scale[:, 0], weight.abs().mean(1))
    assert ((codes[:, 0] == 1) == (weight > 0)).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_rounds_never_lose(bits):
    weight = torch.randn(5, 70)

    def error(rounds):
        codes, scale = fit_levels(weight, grid(bits), 32, rounds)
        dense = (grid(bits)[codes] * scale[..., None]).flatten(1)[:, :70]
        return (weight - dense).square().sum()

    errors = [error(rounds) for rounds in range(6)]
    assert all(later <= earlier + 1e-4 for earlier, later in zip(errors, errors[1:]))


@pytest.mark.parametrize("levels", [*map(grid, range(1, 9)), *(torch.randn(n).sort().values for n in (2, 16, 17, 256)),
                                    torch.tensor([-3.0, 0, 0, 1])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearest_level_is_a_search_among_the_borders(levels, dtype):
    levels = levels.to(dtype)
    borders = (levels[1:] + levels[:-1]) / 2
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    ties = torch.cat([borders, levels, torch.arange(-300, 300, dtype=dtype) / 2])
    beside = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-torch.inf, torch.inf)]
    x = torch.cat([special, ties, *beside, 3 * levels.abs().max() * torch.randn(2000, dtype=dtype)])
    assert torch.equal(nearest_level(x, levels), torch.bucketize(x, borders))
    finite = x[x.abs() < 1e6].double()
    far = (finite[:, None] - levels.double()).abs()
    chosen = far.gather(1, nearest_level(finite.to(dtype), levels)[:, None])
    torch.testing.assert_close(chosen[:, 0], far.amin(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codebook_moves_each_level_to_the_mean_of_what_is_nearest(bits):
    x = torch.cat([torch.randn(400), torch.zeros(300), torch.randn(100).round()])  # ties, and levels of no entry
    levels = codebook(x, bits, rounds=0)
    for rounds in range(1, 6):
        codes = torch.bucketize(x.sort().values, (levels[1:] + levels[:-1]) / 2)
        means = codes.bincount(x.sort().values, minlength=2**bits) / codes.bincount(minlength=2**bits)
        levels = torch.where(means.isnan(), levels, means)
        assert torch.equal(codebook(x, bits, rounds=rounds), levels)


def test_codebook_is_kmeans():
    x = torch.randn(2000)
    start = codebook(x, 3, rounds=0)
    theirs = KMeans(8, init=start.numpy()[:, None], n_init=1, max_iter=1000, tol=0).fit(x.numpy()[:, None])
    close(codebook(x, 3, rounds=1000), torch.tensor(theirs.cluster_centers_[:, 0]).sort().values, 1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_bits_are_packed_without_loss(bits):
    codes = torch.randint(2**bits, (5, 24))
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (5, 3 * bits)
    assert torch.equal(unpack_bits(packed, bits).long(), codes)


@pytest.mark.parametrize("bits,kmeans", [(8, False), (4, False), (4, True), (3, True), (1, False)])
def test_a_quantized_model_computes_with_its_dense_matrices(bits, kmeans):
    model = gpt()
    small, dense, x = quantize(copy.deepcopy(model), bits, kmeans=kmeans), copy.deepcopy(model), ids()
    for name, layer in layers(dense).items():
        layer.weight.data = small.get_submodule(name).matrix.dense()
    with torch.no_grad():
        far = (small(x) - dense(x)).norm() / dense(x).norm()
    assert far < (0.05 if bits == 8 else 1e-5)
    assert n_bytes(small) < n_bytes(model) / 2
    assert small.generate(x, 2).shape == (3, 2)


def test_tied_weights_of_transformers_stay_tied():
    config = transformers.BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = transformers.BertForMaskedLM(config).eval()
    with torch.no_grad():
        before = model(input_ids=ids()).logits
        torch.manual_seed(0)
        small = quantize(copy.deepcopy(model))
    words = small.bert.embeddings.word_embeddings
    assert small.cls.predictions.decoder.matrix is words.matrix and words.matrix.codes.dtype == torch.int8
    with torch.no_grad():
        x = ids()
        assert (small(input_ids=x).logits - model(input_ids=x).logits).norm() < 0.05 * before.norm()


def test_factors_lose_the_singular_values_left_out():
    weight = torch.randn(12, 20)
    values = torch.linalg.svdvals(weight)
    for rank in (1, 4, 11):
        close((weight - Factors.of(weight, rank).dense()).norm(), values[rank:].square().sum().sqrt(), 1e-4)
    close(Factors.of(weight, 12).dense(), weight, 1e-4)


def test_factors_of_a_model_can_be_trained_and_quantized():
    model = factorize(gpt(), 4)
    x = ids()
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    before = model(x).detach()
    with torch.no_grad():
        assert (quantize(model)(x) - before).norm() < 0.1 * before.norm()


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_pruning_is_pytorchs(scope):
    ours = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    theirs = copy.deepcopy(ours)
    linear = [(part, "weight") for part in theirs if isinstance(part, nn.Linear)]
    if scope == "model":
        torch_prune.global_unstructured(linear, torch_prune.L1Unstructured, amount=0.6)
    else:
        for part, name in linear:
            torch_prune.l1_unstructured(part, name, 0.6)
    prune(ours, 0.6, scope=scope)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(ours, theirs) if isinstance(a, nn.Linear))


def test_held_zeros_stay_and_tickets_go_back():
    model = gpt()
    start = copy.deepcopy(model.state_dict())
    hold(prune(model, 0.5))
    optimiser, x = torch.optim.Adam(model.parameters(), 0.1), ids()
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimiser.step()
    release(model)
    for name, layer in layers(model).items():
        assert abs((layer.weight == 0).float().mean() - 0.5) < 0.01, name
    assert not torch.equal(model.state_dict()["stack.norm.weight"], start["stack.norm.weight"])
    rewind(model, start)
    for name, p in model.state_dict().items():
        assert torch.equal(p, torch.where(p == 0, p, start[name])), name


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_straight_through_is_what_is_stored(bits):
    model, x = straight_through(gpt(), bits), ids()
    before = model(x)
    before.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    close(quantize(model, bits)(x), before.detach())


def test_heads_cut_out_are_heads_switched_off():
    model, x = gpt(), ids()
    name = "stack.blocks.1.attention.layer.out"
    with torch.no_grad(), gates(model) as given:
        given[name][1] = 0
        off = model(x)
    cut = remove_heads(copy.deepcopy(model), {name: [1]})
    close(cut(x), off, 1e-5)
    assert cut.get_submodule(name).weight.shape == (24, 16)


def test_importance_is_the_slope_of_the_loss():
    model, x = gpt().double(), ids()

    def losses(model, x):
        return model(x).logsumexp(-1).mean(1)

    found, name = head_importance(model, [x[:2], x[2:]], losses), "stack.blocks.0.attention.layer.out"
    for head in range(3):
        ends = []
        for move in (1e-5, -1e-5):
            with torch.no_grad(), gates(model) as given:
                given[name][head] += move
                ends.append(losses(model, x))
        close(found[name][head], ((ends[0] - ends[1]) / 2e-5).abs().mean(), 1e-5)


@pytest.mark.parametrize("change", [quantize, lambda m: quantize(m, 3, kmeans=True), lambda m: quantize(factorize(m, 4), 4)])
def test_saved_and_loaded(change, tmp_path):
    small, x = change(gpt()), ids()
    save_compressed(small, tmp_path)
    again = load_compressed(gpt(), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(x), small(x))
    assert again.state_dict().keys() == small.state_dict().keys()


def test_another_models_file_is_refused_and_changes_nothing(tmp_path):
    save_compressed(quantize(gpt()), tmp_path)
    other = gpt(d_model=48)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="another model.*is .* here and was"):
        load_compressed(other, tmp_path)
    assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())
    (tmp_path / COMPRESSED).write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="damaged"):
        load_compressed(gpt(), tmp_path)


def hooked():
    model = gpt()
    model.stack.blocks[0].attention.layer.out.register_forward_hook(lambda *_: None)
    return model


test_wrong_calls = refused(
    [
        (lambda: quantize(gpt(), 5), ["bits=5"]),
        (lambda: quantize(gpt(), 4, group=12), ["group=12"]),
        (lambda: quantize(quantize(gpt())), ["no nn.Linear"]),
        (lambda: quantize(hooked()), ["hooks"]),
        (lambda: quantize(hold(gpt())), ["release"]),
        (lambda: quantize(straight_through(gpt(), 1)), ["bits=1"]),
        (lambda: factorize(gpt(), 0), ["rank=0"]),
        (lambda: factorize(gpt(), 1000), ["smaller"]),
        (lambda: prune(gpt(), 1.5), ["share=1.5"]),
        (lambda: prune(gpt(), 0.5, scope="head"), ["scope='head'"]),
        (lambda: prune(hold(gpt()), 0.5), ["release"]),
        (lambda: distillation_loss(torch.ones(2, 3), torch.ones(2, 3), 0), ["temperature=0"]),
        (lambda: distillation_loss(torch.ones(2, 3), torch.ones(2, 4), 1), ["student"]),
        (lambda: remove_heads(gpt(), {"stack.blocks.0.attention.layer.out": [3]}), ["no head 3"]),
        (lambda: remove_heads(gpt(), {"stack.blocks.0.attention.layer.out": [0, 1, 2]}), ["at least one"]),
    ],
    or_else="smaller|release|merge|quantize|leave",
)
