"""Formulas, pairs of integrand and answer, and small programs, against sympy, PyTorch, brute force and Python's compiler."""

import random
import string
from collections import Counter

import pytest
import sympy
import torch
from messages import refused, says
from torch.testing import assert_close

from annotated_nlp.data import collate_pairs
from annotated_nlp.inverse import DECOMPILATION, INTEGRATION, LONGEST, ByParts, Integral
from annotated_nlp.inverse import backward, code_object, differentiate, disassembled
from annotated_nlp.inverse import ids_with_end, integrates, points, random_function
from annotated_nlp.inverse import random_tree, read_source, same_code, shapes, solve
from annotated_nlp.inverse import vocabulary, with_slope, write_source
from annotated_nlp.parts.expressions import SYMBOLS, infix, parse, prefix, simplify
from annotated_nlp.parts.expressions import skeleton, terms, without_constant
from annotated_nlp.seq2seq import teacher_forcing
from annotated_nlp.transformer import Transformer, TransformerConfig

X = sympy.Symbol("x", positive=True)


def as_sympy(tree):
    return sympy.sympify(infix(tree).replace("^", "**"), locals={"x": X})


def drawn(n=60, seed=0, most=6):
    rng = random.Random(seed)
    return [backward(rng.randint(1, most), rng) for _ in range(n)]


def real_trees(n=60, seed=0):
    "Random trees that are real functions, and their simplified forms."
    rng, found = random.Random(seed), []
    while len(found) < n:
        tree = random_tree(rng.randint(0, 5), rng)
        try:
            found.append((tree, simplify(tree)))
        except ValueError:
            pass
    return found


PAIRS = drawn()


# trees ----------------------------------------------------------------------------------------------------------------


def test_prefix_and_back():
    rng = random.Random(1)
    for n in range(200):
        tree = random_tree(n % 9, rng)
        assert parse(prefix(tree)) == tree and set(prefix(tree)) <= set(SYMBOLS)
    assert prefix(("*", "-12", "x")) == ["*", "int-", "1", "2", "x"]


def test_no_beginning_of_a_tree_is_a_tree():
    "Prefix order needs no brackets: nothing shorter or longer than the tree is one."
    for pair in PAIRS[:20]:
        tokens = prefix(pair.integrand)
        for end in range(len(tokens)):
            shorter = tokens[:end]
            # a number may lose its last digits and be a number still
            if tokens[end] not in string.digits or not tokens[end - 1].isdigit():
                with pytest.raises(ValueError, match="inside an expression|no digit"):
                    parse(shorter)
        with pytest.raises(ValueError, match=says("whole expression", f"position {len(tokens)}")):
            parse([*tokens, "x"])


test_what_is_no_tree_is_refused = refused(
    [
        ([], ["ends inside", "give"]),
        (["+", "x"], ["ends inside"]),
        (["int+"], ["no digit"]),
        (["5"], ["'5'", "position 0", "must"]),
        (["sin", "[UNK]"], ["[UNK]", "position 1"]),
    ],
    act=parse,
)


def test_infix_means_the_same_tree():
    "Sympy, which follows the usual order of operations, computes what the tree says."
    rng = random.Random(2)
    at = sympy.Rational(7, 10)
    for n in range(80):
        tree = random_tree(n % 7, rng)
        wanted = complex(sympy.N(as_sympy(tree).subs(X, at)))
        got = with_slope(tree, torch.tensor([0.7 + 0j], dtype=torch.complex128))[0].item()
        if abs(wanted) < 1e6 and wanted == wanted and got == got:
            assert got == pytest.approx(wanted, rel=1e-8)


def test_one_form_is_the_same_function():
    for tree, short in real_trees():
        first, second = (with_slope(t, points().real.to(torch.complex128))[0] for t in (tree, short))
        there = first.isfinite() & second.isfinite()
        assert_close(first[there], second[there], rtol=1e-6, atol=1e-9)


def test_one_form_stays():
    for _, short in real_trees(seed=3):
        assert simplify(short) == short
        assert parse(prefix(short)) == short


@pytest.mark.parametrize("one,other", [
    ("x + x", "2*x"), ("(x + 1)^2", "x^2 + 2*x + 1"), ("exp(x)*exp(2*x)", "exp(3*x)"), ("log(x^3)", "3*log(x)"), ("sin(1 - x)", "-1*sin(x - 1)"),
    ("cos(1 - x)", "cos(x - 1)"), ("sqrt(x)*sqrt(x)", "x"), ("sqrt(4*x)", "2*sqrt(x)"), ("exp(2*log(x))", "x^2"), ("x/(x + x^2)", "1/(1 + x)"),
    ("(x + 1)/(2*x + 2)*(x + 1)", "(x + 1)^2/(2*(x + 1))"), ("x^x", "exp(x*log(x))"), ("sqrt(2)*sqrt(2)", "2"), ("x - x", "0"), ("x^0", "1"),
])
def test_equal_formulas_have_one_form(one, other):
    "Trees from sympy's parser, unevaluated, so that nothing is simplified there."
    trees = [tree_of(text) for text in (one, other)]
    assert simplify(trees[0]) == simplify(trees[1])
    assert sympy.simplify(as_sympy(trees[0]) - as_sympy(trees[1])) == 0


def tree_of(text):
    import ast

    names = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "^"}

    def walk(node):
        if isinstance(node, ast.BinOp):
            return (names[type(node.op)], walk(node.left), walk(node.right))
        if isinstance(node, ast.Call):
            return (node.func.id, walk(node.args[0]))
        if isinstance(node, ast.UnaryOp):
            return f"-{node.operand.value}"
        return node.id if isinstance(node, ast.Name) else str(node.value)

    return walk(ast.parse(text.replace("^", "**"), mode="eval").body)


test_what_is_not_real_is_refused = refused(
    [
        ("log(-2*x)", ["negative", "give"]),
        ("log(x - x)", ["logarithm of zero"]),
        ("sqrt(-3)", ["root of a negative"]),
        ("1/(x - x)", ["divides by zero"]),
        ("1/(x*(1 - 1))", ["divides by zero"]),
        ("(x + 1)^9", ["power above 6"]),
        ("3^99", ["power above 64"]),
        ("(x + sin(x) + cos(x) + log(x))^6", ["24 terms"]),
        ("tan(x)", ["operator='tan'", "must"]),
    ],
    act=lambda text: simplify(tree_of(text)),
)


def with_other_constants(tree, rng):
    "Every coefficient changed that isn't a power."
    if isinstance(tree, str):
        return tree if tree == "x" else str(rng.choice([7, 11, 13]))
    name, *parts = tree
    if name == "^" and isinstance(parts[1], str):
        return (name, with_other_constants(parts[0], rng), parts[1])
    return (name, *(with_other_constants(part, rng) for part in parts))


def test_a_skeleton_forgets_constants():
    assert skeleton(tree_of("2*x*cos(3*x)")) == skeleton(tree_of("x*cos(x)/5")) != skeleton(tree_of("x*cos(x^2)"))
    assert skeleton(tree_of("x^2")) != skeleton(tree_of("x^3"))
    assert skeleton(tree_of("sin(2*x + 1)")) == skeleton(tree_of("3*sin(5*x + 7)")) != skeleton(tree_of("sin(2*x)"))
    assert skeleton(tree_of("exp(2*x + 1)")) == skeleton(tree_of("exp(x)"))  # a factor e
    assert skeleton(tree_of("sqrt(2)*x")) == skeleton(tree_of("x*sin(1)"))
    for integrand in ("3*cos(2*x)*exp(4*x) - 5*x^2", "sqrt(3*x + 5)/(7*x)", "2/(x*(4*log(x) + 3)^2)"):
        tree, rng = tree_of(integrand), random.Random(0)
        assert skeleton(with_other_constants(tree, rng)) == skeleton(tree)


def test_terms_make_the_sum():
    for _, short in real_trees(seed=4):
        total = "0"
        for coefficient, product in terms(short):
            total = ("+", total, ("*", coefficient, product))
        assert simplify(total) == short
    assert terms("0") == [] and without_constant(tree_of("log(2*x) + 3")) == ("log", "x")


# derivatives ----------------------------------------------------------------------------------------------------------


def test_derivatives_are_those_of_sympy():
    for tree, _ in real_trees(40, seed=5):
        wanted = sympy.lambdify(X, sympy.diff(as_sympy(tree), X), "mpmath")
        value, slope = with_slope(tree, points())
        formula, _ = with_slope(differentiate(tree), points())
        for i, x in enumerate(points().tolist()):
            if value[i].isfinite() and slope[i].isfinite() and formula[i].isfinite() and abs(value[i]) < 1e6:
                exact = complex(wanted(x))
                assert slope[i].item() == pytest.approx(exact, rel=1e-7, abs=1e-9)
                assert formula[i].item() == pytest.approx(exact, rel=1e-7, abs=1e-9)


def test_values_are_those_of_autograd():
    "The slope of a dual number, against PyTorch's own gradient on the real line."
    tree = tree_of("exp(sin(x)*x) + log(x)/sqrt(x + 2) - x^3*cos(2*x)^x")
    x = torch.tensor([0.4, 0.7, 0.6], dtype=torch.double, requires_grad=True)
    y = torch.exp(torch.sin(x) * x) + torch.log(x) / torch.sqrt(x + 2) - x**3 * torch.cos(2 * x) ** x
    [wanted] = torch.autograd.grad(y.sum(), x)
    value, slope = with_slope(tree, x.detach().to(torch.complex128))
    assert_close(value.real, y.detach())
    assert_close(slope.real, wanted)


def test_unknown_operators_are_refused():
    for call in (differentiate, lambda tree: with_slope(tree, points())):
        with pytest.raises(ValueError, match=says("tan")):
            call(("tan", "x"))


# drawing --------------------------------------------------------------------------------------------------------------


def test_shapes_are_the_large_schroeder_numbers():
    "https://oeis.org/A006318, and counted one by one."
    assert [shapes(1, n) for n in range(9)] == [1, 2, 6, 22, 90, 394, 1806, 8558, 41586]

    def every(n):
        if n == 0:
            return [()]
        pairs = [(a, b) for k in range(n) for a in every(k) for b in every(n - 1 - k)]
        return [(a,) for a in every(n - 1)] + pairs

    assert [len(set(every(n))) for n in range(6)] == [shapes(1, n) for n in range(6)]
    assert shapes(2, 1) == 4 and shapes(0, 1) == 0 and shapes(3, 0) == 1


def test_every_shape_is_as_probable_as_every_other():
    shape = lambda tree: tuple(map(shape, tree[1:] if tree[0] != "^" else tree[1:2])) if isinstance(tree, tuple) else ()
    rng = random.Random(0)
    counted = Counter(shape(random_tree(3, rng)) for _ in range(22 * 400))
    assert len(counted) == 22
    # chi squared with 21 degrees of freedom is above 50 once in 2,500 times
    assert sum((n - 400) ** 2 / 400 for n in counted.values()) < 50
    with pytest.raises(ValueError, match=says("operators=-1")):
        random_tree(-1, rng)


def test_pairs_are_right_by_sympy():
    for integrand, answer in PAIRS[:40]:
        difference = sympy.diff(as_sympy(answer), X) - as_sympy(integrand)
        assert abs(complex(sympy.N(difference.subs(X, sympy.Rational(83, 100)), 30))) < 1e-15
    assert all(len(prefix(tree)) <= LONGEST for pair in PAIRS for tree in pair)


def test_by_parts_builds_on_what_is_known():
    parts = ByParts([Integral(("exp", "x"), ("exp", "x"))])
    assert parts.integral(tree_of("3*exp(x)")) is not None and parts.integral(tree_of("x*exp(x)")) is None
    rng = random.Random(0)
    parts = ByParts(drawn(400, seed=7, most=3))
    found = [parts.draw(3, rng) for _ in range(150)]
    assert all(integrates(*pair) for pair in found) and len(set(found)) > 40
    before = {pair.integrand for pair in drawn(400, seed=7, most=3)}
    assert [pair for pair in found if pair.integrand not in before]
    for integrand, answer in found[:20]:
        assert sympy.simplify(sympy.diff(as_sympy(answer), X) - as_sympy(integrand)) == 0


# verifying ------------------------------------------------------------------------------------------------------------


def changed(tree, rng):
    "The tree with one token of it exchanged for another of its kind."
    tokens = prefix(tree)
    kinds = [set("0123456789"), {"exp", "log", "sqrt", "sin", "cos"}, set("+-*/"), {"int+", "int-"}]
    while True:
        at = rng.randrange(len(tokens))
        for kind in kinds:
            if tokens[at] in kind:
                return parse([*tokens[:at], rng.choice(sorted(kind - {tokens[at]})), *tokens[at + 1 :]])
        if tokens == ["x"]:
            return ("*", "2", "x")
        if not any(token in kind for token in tokens for kind in kinds):
            return ("*", "2", tree)


def test_right_answers_are_accepted_and_others_refused():
    rng, wrong = random.Random(0), 0
    for integrand, answer in PAIRS + drawn(200, seed=8):
        assert integrates(integrand, answer) and integrates(integrand, ("+", answer, "5"))
        other = changed(answer, rng)
        slope, wanted = with_slope(other, points(5, 3))[1], with_slope(integrand, points(5, 3))[0]
        same = torch.allclose(slope, wanted, rtol=1e-6, atol=1e-12)  # log(2 x) for log(3 x), at other points
        assert integrates(integrand, other) == same
        wrong += not same
    assert wrong > 200


def test_verdicts_are_those_of_sympy():
    rng, seen = random.Random(1), Counter()
    for integrand, answer in drawn(40, seed=9, most=4):
        for tree in (answer, changed(answer, rng)):
            difference = sympy.simplify(sympy.diff(as_sympy(tree), X) - as_sympy(integrand))
            if difference == 0 or difference.is_number or abs(complex(difference.subs(X, 0.83).evalf(30))) > 1e-9:
                assert integrates(integrand, tree) == (difference == 0)
                seen[difference == 0] += 1
    assert min(seen.values()) > 20


def test_another_form_of_the_answer_is_right():
    assert integrates(tree_of("2*sin(x)*cos(x)"), tree_of("sin(x)^2"))
    assert integrates(tree_of("2*sin(x)*cos(x)"), tree_of("(-1)*cos(x)^2"))
    assert integrates(tree_of("1/x"), tree_of("log(7*x)"))
    assert not integrates("x", tree_of("x^2")) and not integrates("x", ("/", "1", "0"))
    with pytest.raises(ValueError, match=says("tolerance=2")):
        integrates("x", "x", tolerance=2)


# programs -------------------------------------------------------------------------------------------------------------


def functions(n=150, seed=0):
    rng = random.Random(seed)
    return [random_function(rng) for _ in range(n)]


def test_a_source_survives_its_tokens():
    for source in functions():
        again = read_source(write_source(source))
        assert same_code(code_object(source), code_object(again))
        assert DECOMPILATION.verify(code_object(source), DECOMPILATION.read(write_source(source)))


def test_different_functions_are_different_to_the_machine():
    kept = functions(60, seed=1)
    for one, other in zip(kept, kept[1:]):
        if ast_of(one) != ast_of(other):
            assert disassembled(code_object(one)) != disassembled(code_object(other)) or same_code(code_object(one), code_object(other))
    swapped = ("def f(a, b, c):\n    return a - b", "def f(a, b, c):\n    return b - a")
    assert not same_code(*map(code_object, swapped))
    assert not same_code(*(code_object(f"def f(a):\n    return {value}") for value in ("1", "True")))
    assert same_code(code_object("def f(a):\n    return (a)"), code_object("def g(a):\n\n    return a"))
    for one, other in [("0.0", "-0.0"), ("(1,)", "(True,)")]:
        assert not same_code(*(code_object(f"def f(a):\n    return {value}") for value in (one, other)))
    for one, other in [("a, *b", "a, *, b"), ("a, b", "a, b, /")]:
        assert not same_code(*(code_object(f"def f({arguments}):\n    return a") for arguments in (one, other)))
    inner = [f"def f(a):\n{lines}    return lambda b: b" for lines in ("", "\n\n")]
    assert same_code(*map(code_object, inner))


def ast_of(source):
    import ast

    return ast.dump(ast.parse(source))


def test_tokens_tell_functions_apart():
    "Equal tokens mean the same code, so that the question has all that the answer is verified by."
    by_tokens = {}
    for source in functions(600, seed=2):
        code = code_object(source)
        first = by_tokens.setdefault(tuple(disassembled(code)), code)
        assert same_code(first, code)
    assert len(by_tokens) > 300


test_what_is_no_function_is_refused = refused(
    [
        (["def", "f", "("], ["source", "must"]),
        (["x", "=", "1", "¶"], ["source", "must be one function"]),
        (["def", "f", "(", ")", ":", "¶", "return", "1", "¶"], ["must be one function"]),
        ([], ["must be one function"]),
    ],
    act=read_source,
)


# solving --------------------------------------------------------------------------------------------------------------


def trained(pairs, vocab, steps):
    rows = [(ids_with_end(prefix(pair.integrand), vocab), [vocab["[BOS]"], *ids_with_end(prefix(pair.answer), vocab)]) for pair in pairs]
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(src_vocab_size=len(vocab), tgt_vocab_size=len(vocab), shared_vocab=True, d_model=32, n_heads=2, d_ff=64, n_layers=1, dropout=0.0, max_len=64))
    if steps:
        teacher_forcing(model, [collate_pairs(rows)], steps=steps)
    return model


def test_what_was_learned_is_found_and_verified():
    pairs, vocab = [Integral("x", tree_of("x^2/2")), Integral(("cos", "x"), ("sin", "x")), Integral(("exp", "x"), ("exp", "x"))], vocabulary([SYMBOLS])
    model = trained(pairs, vocab, 150)
    questions = [pair.integrand for pair in pairs]
    model.train()
    for options in (dict(beam=True), dict(generator=torch.Generator().manual_seed(0))):
        found = solve(model, INTEGRATION, questions, vocab, 4, max_new_tokens=12, rows=5, **options)
        assert [candidates.answer for candidates in found] == [pair.answer for pair in pairs]
        assert all(len(candidates.right) == 4 and candidates.right[0] for candidates in found)
    assert model.training  # as before


def test_nothing_wrong_is_called_right():
    "A model that knows nothing: whatever it is said to have found is an antiderivative, by sympy."
    vocab = vocabulary([SYMBOLS])
    model = trained([], vocab, 0)
    found = solve(model, INTEGRATION, ["1", "x", ("sin", "x")], vocab, 200, temperature=0.7, max_new_tokens=4, generator=torch.Generator().manual_seed(1))
    assert [len(candidates.right) for candidates in found] == [200] * 3
    for question, candidates in zip(["1", "x", ("sin", "x")], found):
        assert (candidates.answer is None) == (not any(candidates.right))
        if candidates.answer is not None:
            assert sympy.simplify(sympy.diff(as_sympy(candidates.answer), X) - as_sympy(question)) == 0
    with pytest.raises(ValueError, match=says("n=0")):
        solve(model, INTEGRATION, ["x"], vocab, 0)


def test_vocabulary_and_its_numbers():
    vocab = vocabulary([["b", "a"], ["a"]])
    assert list(vocab) == ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "a", "b"] and list(vocab.values()) == list(range(6))
    assert ids_with_end(["a", "z"], vocab) == [4, 1, 3]
