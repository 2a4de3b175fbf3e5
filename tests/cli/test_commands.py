import json
import pathlib
import re

import pytest
import torch

import torchremat as tr
from tests.cli.commands import in_folder, output_of, run  # noqa: F401
from torchremat._torch.parts import PrivatePart
from torchremat.cli.arguments.targets import load_target
from torchremat.cli.commands import check_env
from torchremat.cli.commands.run_bench import describe_difference
from torchremat.errors import PyTorchVersionError

pytestmark = pytest.mark.usefixtures("in_folder")
MODEL = "model.py:make"


def bound():
    """The function of MODEL, and its arguments."""
    target = load_target(MODEL)
    return target.fun, *target.args


def test_plan_prints_its_summary_and_what_is_saved_replays():
    text = output_of("plan", MODEL, "--budget", "80%", "--save", "plan.json", "--on", "h100")
    plan = tr.planning.Plan.load("plan.json")
    assert text == f"{plan.summary()}\n"
    replayed = output_of("residuals", MODEL, "--policy", "plan:plan.json", "--json", "-")
    assert json.loads(replayed)["total"] == plan.saved_bytes


def test_plan_as_json_has_the_figures_of_the_plan():
    found = json.loads(output_of("plan", MODEL, "--budget", "80%", "--json", "-"))
    plan = tr.plan(*bound(), budget="80%")
    assert found["peak_bytes"] == plan.peak_bytes <= found["budget"]
    assert found["decisions"] == plan.decisions
    assert found["baseline"]["flops"] == plan.baseline.flops


def test_plan_counts_an_optimizer_on_the_meta_device():
    args = ["plan", MODEL, "--budget", "95%", "--json", "-", "--device", "meta"]
    without = json.loads(output_of(*args))
    with_adam = json.loads(output_of(*args, "--optimizer", "adamw"))
    parameters = sum(p.nbytes for p in bound()[0].parameters())
    assert with_adam["baseline"]["peak_bytes"] > without["baseline"]["peak_bytes"] + 3 * parameters


def test_a_budget_that_cannot_be_met_says_the_least_that_can():
    result = run("plan", MODEL, "--budget", "1kB")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "The least that was found is" in result.stderr


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_residuals_are_those_of_explain(policy):
    report = tr.explain(*bound(), policy=policy)
    assert output_of("residuals", MODEL, "--policy", policy) == f"{report}\n"
    assert output_of("residuals", MODEL, "--policy", policy, "--json", "-") == (
        f"{report.to_json()}\n"
    )


def test_fit_has_the_figures_of_fit_and_saves_its_plan():
    args = ["fit", MODEL, "--memory", "100KiB", "--max", "batch", "--json", "-", "--on", "h100"]
    printed = json.loads(output_of(*args, "--device", "meta", "--save", "plan.json"))
    found = tr.fit(*bound(), memory="100KiB", maximize="batch", device="h100")
    assert printed["size"] == found.size > printed["plain_size"] == found.plain_size
    assert printed["peak_bytes"] == found.peak_bytes <= printed["memory"] == 100 * 1024
    assert printed["plan"]["decisions"] == tr.planning.Plan.load("plan.json").decisions
    text = output_of("fit", MODEL, "--memory", "1GiB", "--save", "none.json")
    assert "none is needed" in text and not pathlib.Path("none.json").exists()


def test_fit_says_the_least_memory_and_exits_with_1():
    result = run("fit", MODEL, "--memory", "1KiB", "--max", "batch")
    assert result.exit_code == 1 and "batch 1 does not fit. The least that was" in result.stderr
    assert run("fit", MODEL, "--memory", "half").exit_code == 2
    result = run("fit", MODEL, "--memory", "1MiB", "--max", "bach")
    assert result.exit_code in {1, 2} and "nearest: 'batch'" in result.stderr


def test_residuals_of_selected_modules_are_those_of_wrap():
    model, *args = bound()
    report = tr.explain(tr.nn.wrap(model, "full", select="layers.*"), *args)
    assert output_of("residuals", MODEL, "--policy", "full", "--select", "layers.*") == (
        f"{report}\n"
    )


def test_residuals_a_line_each(capsys):
    tr.print_saved_residuals(*bound())
    assert output_of("residuals", MODEL, "--lines") == capsys.readouterr().out


def test_residuals_by_module_add_up():
    text = output_of("residuals", MODEL, "--by-module")
    lines = [line.split("  ") for line in text.splitlines()]
    assert [line[-1] for line in lines] == ["module", *(f"layers.{i}" for i in range(3)), "in all"]


def test_graph_is_that_of_make_graph():
    model, *args = bound()
    graph = tr.make_graph(model)(*args)
    assert output_of("graph", MODEL) == f"{graph}\n"
    eqns = json.loads(output_of("graph", MODEL, "--json", "-"))["eqns"]
    assert [eqn["op"] for eqn in eqns] == [str(eqn.op) for eqn in graph.eqns]


def test_graph_with_sources_and_a_policy():
    text = output_of("graph", MODEL, "--policy", "dots", "--sources")
    assert "policy=dots_saveable" in text
    assert "model.py:12 (forward)" in text
    assert "core.py" not in text  # what called the command is no line of the user's


def test_compare_has_the_figures_of_explain_and_estimate():
    rows = json.loads(
        output_of("compare", MODEL, "--policy", "full", "--budget", "80%", "--json", "-")
    )
    assert [row["policy"] for row in rows] == ["plain", "full", "budget:80%"]
    for row in rows:
        policy = "none" if row["policy"] == "plain" else row["policy"]
        estimate = tr.estimate(*bound(), policy=policy)
        assert row["peak_bytes"] == estimate.peak_bytes
        assert row["held_bytes"] == tr.explain(*bound(), policy=policy).total


def test_compare_simulates_the_peak_that_bench_measures_of_selected_modules():
    args = [MODEL, "--policy", "full", "--select", "layers.*", "--json", "-"]
    compared = json.loads(output_of("compare", *args, "--device", "meta"))
    measured = json.loads(output_of("bench", *args, "--rounds", "1"))["rows"]
    assert [row["peak_bytes"] for row in compared] == [row["peak_bytes"] for row in measured[:2]]
    assert compared[1]["added_seconds"] > 0
    assert "-" not in output_of("compare", *args[:-2]).splitlines()[-1].split()


def test_compare_lets_the_checkpoints_of_the_model_decide():
    rows = json.loads(
        output_of("compare", "model.py:make_wrapped", "--policy", "none", "--json", "-")
    )
    model, args = load_target("model.py:make_wrapped").fun, bound()[1:]
    peaks = [tr.estimate(model, *args, policy=policy).peak_bytes for policy in (None, "none")]
    assert [row["peak_bytes"] for row in rows] == peaks
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("select", [[], ["--select", "layers.*"]])
def test_bench_measures_each_policy_as_often(select):
    text = output_of("bench", MODEL, "--policy", "full", *select, "--rounds", "2", "--json", "-")
    rows = {row["policy"]: row for row in json.loads(text)["rows"]}
    assert list(rows) == ["plain", "full", "plain again"]
    assert {len(row["seconds"]) for row in rows.values()} == {2}
    assert all(row["bit_equal"] for row in rows.values())
    assert rows["plain"]["peak_bytes"] == rows["plain again"]["peak_bytes"]
    assert (rows["full"]["peak_bytes"] < rows["plain"]["peak_bytes"]) == bool(select)


def test_bench_prints_a_table():
    lines = output_of("bench", MODEL, "--policy", "dots", "--rounds", "1").splitlines()
    assert [line.split("  ")[0] for line in lines] == ["policy", "plain", "dots", "plain again"]
    assert [line.split()[-1] for line in lines] == ["bit-equal", "yes", "yes", "yes"]


def test_bench_says_what_is_not_bit_equal():
    text = output_of("bench", "model.py:make_other_each_time", "--policy", "full", "--rounds", "1")
    assert re.search(r"^plain again .* no: output 0 differs by \d+$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (torch.tensor([1.0, float("nan")]), None),
        (torch.tensor([1.5, float("nan")]), "grad of w differs by nan"),
        (torch.tensor([1.0, 2.0]), "grad of w differs by nan"),
        (torch.tensor([1.0]), "grad of w is f32[1], not f32[2]"),
        (None, "grad of w is missing"),
    ],
)
def test_a_difference_is_told(b, said):
    a = torch.tensor([1.0, float("nan")])
    assert describe_difference({"grad of w": a}, {"grad of w": b}) == said


def test_bench_needs_values():
    result = run("bench", MODEL, "--policy", "full", "--device", "meta")
    assert result.exit_code == 1
    assert "bench runs the step" in result.stderr


def test_env_has_versions_and_no_secrets(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/ann/cache")
    text = output_of("env")
    assert torch.__version__ in text
    assert "OMP_NUM_THREADS" in text
    assert not {"hf_secret", "/home/ann"} & set(text.split())
    assert json.loads(output_of("env", "--json", "-"))["packages"]["torch"] == torch.__version__


def test_json_goes_to_a_file_beside_the_text():
    result = run("residuals", MODEL, "--json", "report.json")
    assert "saved for the backward pass" in result.stdout
    assert result.stderr == "wrote report.json\n"
    with open("report.json", encoding="utf-8") as file:
        assert json.load(file)["total"] == tr.explain(*bound()).total


def test_env_check_tries_the_features():
    found = json.loads(output_of("env", "--check", "--json", "-"))
    assert (found["torch"], found["missing"]) == (torch.__version__, {})
    assert len(found["features"]) > 8
    assert set(found["features"].values()) == {"works"}


def test_env_check_says_what_fails_without_a_part(monkeypatch):
    def lack():
        raise PyTorchVersionError("torchremat needs torch._C._lost\nand so on")

    lost = PrivatePart("torch._C: _lost", "To find.", "None.", "Nothing can be found.")
    features = {"nn.wrap": lambda: True, "plan": lack, "jit": lambda: False}
    monkeypatch.setattr(check_env, "all_parts", lambda: iter([lost]))
    monkeypatch.setattr(check_env, "FEATURES", features)
    result = run("env", "--check")
    assert result.exit_code == 1
    assert f"PyTorch {torch.__version__}; tested with 2.11 to 2.15\n" in result.output
    assert "private parts: 1, of which 1 missing" in result.output
    assert re.search(r"torch\._C\._lost +Nothing can be found\.", result.output)
    assert re.search(r"plan +fails: PyTorchVersionError: .*_lost\n", result.output)
    assert re.search(r"jit +fails: the results are not", result.output)
    assert re.search(r"nn.wrap +works", result.output)
    monkeypatch.setattr(check_env, "FEATURES", {"nn.wrap": lambda: True})
    monkeypatch.setattr(check_env, "all_parts", lambda: iter([]))
    assert "private parts: 0, of which none missing\n\nfeatures:" in output_of("env", "--check")


def test_check_exits_with_1_where_a_plan_holds_no_longer(in_folder):  # noqa: F811
    output_of("plan", MODEL, "--budget", "90%", "--save", "plan.json")
    text = output_of("check", "plan.json", MODEL, "--device", "meta")
    assert text.startswith("plan.json holds for model.py:make: peak ")
    assert json.loads(output_of("check", "plan.json", MODEL, "--json", "-"))["holds"] is True
    text = (in_folder / "model.py").read_text()
    (in_folder / "other.py").write_text(text.replace("torch.tanh(", "torch.sin("))
    result = run("check", "plan.json", "other.py:make")
    assert result.exit_code == 1
    assert "the plan is for another graph: node" in result.stderr
    content = json.loads((in_folder / "plan.json").read_text())
    content["peak_bytes"] -= 1
    (in_folder / "less.json").write_text(json.dumps(content))
    result = run("check", "less.json", MODEL)
    assert result.exit_code == 1
    assert "less.json no longer holds for model.py:make: the peak is" in result.stderr
    assert run("check", "none.json", MODEL).exit_code == 2


def test_diff_sets_two_plans_side_by_side():
    output_of("plan", MODEL, "--budget", "100%", "--save", "a.json")
    output_of("plan", MODEL, "--budget", "80%", "--save", "b.json")
    a, b = (tr.planning.Plan.load(name) for name in ("a.json", "b.json"))
    found = json.loads(output_of("diff", "a.json", "b.json", "--json", "-"))
    assert found["same_graph"] is True
    assert found["figures"]["peak_bytes"] == [a.peak_bytes, b.peak_bytes]
    assert sum(map(len, found["changes"].values())) == sum(
        a.decisions.get(name) != b.decisions.get(name) for name in {**a.decisions, **b.decisions}
    )
    assert "values decided otherwise" in output_of("diff", "a.json", "b.json")
    assert "0 values decided otherwise" in output_of("diff", "a.json", "a.json", "--exit-code")
    assert run("diff", "a.json", "b.json", "--exit-code").exit_code == 1
