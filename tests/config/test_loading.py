import shutil
from pathlib import Path

import pytest

from envs.libero.config import LIBERO_TASKS, LiberoConfig
from envs.libero.protocol.tasks import STEP_LIMITS
from envs.tabletop.config import TabletopConfig
from tests import ROOT
from vla_rl.config.loading import ConfigError, dump_config, load_config
from vla_rl.config.run_config import RunConfig
from vla_rl.core.machine import Gpu, Machine
from vla_rl.placement.checks import machine_checks

SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
SMALL_MACHINE = Machine(cpus=2, memory=8 << 30, gpus=())


def problems(path: Path | None, *overrides: str, machine: Machine | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, machine_checks(machine) if machine else ())
    return caught.value.problems


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_config_loads_and_survives_a_dump(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parents[1])  # checkpoints are named relative to the repository
    config = load_config(path, (), machine_checks(SMALL_MACHINE))
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


def test_configs_are_shipped():
    assert {path.name for path in SHIPPED} >= {
        "libero_ppo.yaml",
        "maniskill_ppo.yaml",
        "metaworld_ppo.yaml",
        "tabletop.yaml",
    }


def test_no_file_and_no_overrides_are_the_defaults(file):
    assert load_config(None) == RunConfig()
    assert load_config(file("")) == RunConfig()
    assert load_config(file("# nothing yet\n")) == RunConfig()


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(file):
    path = file("train: {iterations: 7, max_staleness: 1}\n")
    config = load_config(path, ["train.iterations=3", "train.iterations=4", "train={keep_checkpoints: 5}"])
    assert (config.train.iterations, config.train.max_staleness, config.train.keep_checkpoints) == (4, 1, 5)


def test_a_file_changes_its_base_and_that_ones_base(file, tmp_path: Path):
    (tmp_path / "a.yaml").write_text("algo: {name: ppo, minibatches: 2}\ntrain: {iterations: 7, max_staleness: 1}\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.yaml").write_text("base: ../a.yaml\ntrain: {iterations: 8}\n")
    config = load_config(file("base: sub/b.yaml\nalgo: {clip_low: 0.1}\n"))
    assert (config.train.iterations, config.train.max_staleness) == (8, 1)
    assert (config.algo.minibatches, config.algo.clip_low) == (2, 0.1)
    other = load_config(file("base: sub/b.yaml\nalgo: {name: grpo}\n"))
    assert other.algo == load_config(None, ["algo=grpo"]).algo, "a new kind starts from its own defaults"


def test_a_base_that_cannot_be_is_one_problem(file, tmp_path: Path):
    (only,) = problems(file("base: b.yaml\n"))
    assert f"base=b.yaml ({tmp_path / 'run.yaml'}:1): there is no file {tmp_path / 'b.yaml'}" in only
    (tmp_path / "b.yaml").write_text("base: run.yaml\n")
    (only,) = problems(file("base: b.yaml\n"))
    assert f"{tmp_path / 'b.yaml'}:1" in only
    assert "is this file itself" in only
    (tmp_path / "b.yaml").write_text("train:\n  iteration: 3\n")
    (only,) = problems(file("base: b.yaml\n"))
    assert f"{tmp_path / 'b.yaml'}:2" in only


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("learner.lr=1e-4", 1e-4),
        ("learner.lr=1", 1.0),
        ("learner.value_lr=null", None),
        ("env.tasks=[2, 1]", (2, 1)),
        ("env.tasks=[]", ()),
        ("env.proprio=false", False),
        ("log.name=a=b", "a=b"),
        ('log.name="2024"', "2024"),
        ("policy.temperature=1.6", 1.6),
    ],
)
def test_values_are_typed_as_in_yaml(override: str, value: object):
    group, key = override.split("=")[0].split(".")
    found = getattr(getattr(load_config(None, [override]), group), key)
    assert found == value
    assert type(found) is type(value)


def test_naming_a_simulator_starts_from_its_defaults_and_naming_it_again_changes_nothing(file):
    path = file("env: {suite: libero_goal, tasks: [1]}\nalgo: {name: ppo, clip_high: 0.28}\n")
    assert load_config(path, ["env=libero", "algo=ppo"]) == load_config(path)
    assert load_config(path, ["algo=ppo"]).algo.clip_high == 0.28
    assert load_config(path, ["env=tabletop"]).env == TabletopConfig()
    assert load_config(path, ["env=tabletop", "env=libero"]).env == LiberoConfig()
    config = load_config(path, ["env=tabletop", "env.distractors=3"])
    assert config.env == TabletopConfig(distractors=3)
    assert load_config(path, ["env={distractors: 3, name: tabletop}"]) == config
    assert load_config(path, ["env.name=tabletop", "env.distractors=3"]) == config


def test_a_file_may_use_the_short_form(file):
    assert load_config(file("env: tabletop\nalgo: ppo\n")).env == TabletopConfig()


def test_every_problem_is_reported_at_once_with_its_place(file):
    path = file(
        "mode: asink\n"
        "train:\n"
        "  iteration: 5\n"
        "  batch_episodes: '3'\n"
        "  max_staleness: 1\n"
        "  max_staleness: 2\n"
        "env: {tasks: [3, x]}\n"
        "algo: {importance_cap: 2.0}\n"
        "polcy: {size: tiny}\n"
        "log:\n"
    )
    found = problems(path, "train.iterations", "placement.max_batch=0", "lr=3", "learner.betas=[1,1]", "env.tusks=[1]")
    assert len(found) == 13
    text = "\n".join(found)
    for line in (
        f"mode=asink ({path}:1): unknown value; did you mean async? allowed: async, sync",
        f"train.iteration=5 ({path}:3): unknown key; did you mean train.iterations?",
        f'train.batch_episodes="3" ({path}:4): must be a whole number',
        f"train.max_staleness ({path}:6): given before on line 5; keep one",
        f"env.tasks[1]=x ({path}:7): must be a whole number",
        f"algo ({path}:8): importance_cap=2.0 is about weights",
        f"({path}:9): unknown key; did you mean policy?",
        f"log=null ({path}:10): is a group of keys; set one of log.dir, ",
        "train.iterations (command line): is not an override; write KEY=VALUE",
        "placement.max_batch=0 (command line): must be at least 1",
        "lr=3 (command line): unknown key; did you mean learner.lr?",
        "learner.betas=[1.0, 1.0] (command line): AdamW needs both below 1",
        "env.tusks=[1] (command line): unknown key; did you mean env.tasks?",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.iterations=true", "must be a whole number"),
        ("train.iterations=1e3", "must be a whole number"),
        ("train.iterations={}", "must be a whole number"),
        ("learner.lr=-1", "must be at least 0"),
        ("learner.lr=.nan", "must be a finite number"),
        ("learner.lr=.inf", "must be a finite number"),
        ("learner.lr=fast", "must be a number"),
        ("learner.zero_stage=4", "must be at most 3"),
        ("learner.betas=[0.9]", "learner.betas=[0.9] (command line): has too few items"),
        ("learner.betas=[0.9,0.9,0.9]", "must have at most 2 items"),
        ("env.proprio=perhaps", "must be true or false"),
        ("env.tasks=3", "must be a list, such as [0,1]"),
        ("env.tasks=[1", "is not valid YAML"),
        ("env=3", "env=3 (command line): is a group of keys"),
        ("env=tabletopp", "env.name=tabletopp (command line): unknown value; did you mean tabletop?"),
        ("env.distractors=2", "it is a key of env=tabletop, and libero is selected"),
        ("algo=reinforce", "algo.name=reinforce (command line): unknown value; allowed: "),
        ("log.name=3", "must be text: put it in quotes"),
        ("log.name=${seed}", "interpolation is not supported"),
        ("clip_high=0.3", "did you mean algo.clip_high?"),
        ("train.zzz=1", "known keys: train.iterations, "),
        ("+train.iterations=2", "is not an override"),
        ("train..iterations=2", "is not an override"),
        ("env.tasks[0]=2", "is not an override"),
        ("=2", "is not an override"),
    ],
)
def test_one_bad_override_gives_one_problem(override: str, expected: str):
    (found,) = problems(None, override)
    assert expected in found


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_age=1", "unknown key; it is now train.max_staleness"),
        ("placement.slots_per_worker=8", "unknown key; it is now placement.envs_per_worker"),
        ("env.implementation=untouched", "unknown value; it is now reference; allowed: fast, reference"),
        ("env.assets=stand-ins", "unknown value; it is now placeholder; allowed: auto, placeholder"),
    ],
)
def test_what_was_renamed_is_told_its_new_name(override: str, expected: str):
    assert problems(None, override) == (f"{override} (command line): {expected}",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {iterations: 2\nseed: 1\n", ":2:5: not valid YAML"),
        ("train:\n\titerations: 2\n", ":2:1: not valid YAML"),
        ("- train\n", ":1:1: not valid YAML: expected groups"),
        ("env: &e {name: libero}\nalgo: *e\n", ":2:7: not valid YAML: aliases are not supported"),
        ("seed: !!python/object:os.system 1\n", ":1:7: not valid YAML"),
        ("seed: 1\n---\nseed: 2\n", "not valid YAML"),
        (b"\xff\xfe\x00", "cannot be read"),
        ("seed: \x00\n", "not valid YAML"),
    ],
)
def test_a_broken_file_is_one_problem_in_addition_to_those_of_the_overrides(file, text: str | bytes, expected: str):
    path = file(text)
    first, second = problems(path, "train.iterations=0")
    assert first.startswith(str(path))
    assert expected in first
    assert second.startswith("train.iterations=0 (command line)")


def test_a_missing_file_names_the_shipped_ones(tmp_path: Path):
    (found,) = problems(tmp_path / "none.yaml")
    assert "none.yaml: does not exist" in found
    assert "libero_ppo" in found


def test_a_check_that_would_judge_a_default_in_place_of_a_refused_value_is_silent():
    (found,) = problems(None, "env.suite=libero_99", "env.tasks=[55]")
    assert found.startswith("env.suite=libero_99")
    (found,) = problems(None, "algo.importance_cap=2", "algo.proximal=recomputedd")
    assert found.startswith("algo.proximal=recomputedd")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["env.tasks=[9,10,12]"], "env.tasks=[9, 10, 12] (command line): libero_spatial has tasks 0..9, not 10, 12"),
        (["env.suite=libero_90", "env.tasks=[90]"], "libero_90 has tasks 0..89, not 90"),
        (["env=tabletop", "env.tasks=[push,reach,push]"], "names push more than once"),
        (["learner.offload_optimizer=cpu"], "set learner.zero_stage=1 or more, not 0"),
        (["learner.offload_parameters=cpu", "learner.zero_stage=2"], "set learner.zero_stage=3, not 2"),
        (["env.max_episode_steps=4"], "policy.chunk_size=8: an episode of env.max_episode_steps=4"),
        (["learner.betas=[0.9,1]"], "AdamW needs both below 1"),
        (["placement.compile_blocks=true", "policy=pi0"], "policy.name=pi0 has none that can be compiled"),
        (
            ["placement.cuda_graphs=true", "policy.temperature_end=0.5"],
            "policy.temperature_end changes the temperature",
        ),
        (["placement.cuda_graphs=true", "policy.jpeg=true"], "policy.jpeg=true compresses images on the host"),
        (["learner.compile_blocks=true", "policy=pi0"], "policy.name=pi0 has none that can be compiled"),
        (["learner.compile_blocks=true", "learner.zero_stage=3"], "learner.zero_stage=3 gathers weights inside"),
        (
            ["train.publish_every=4"],
            "train.publish_every=4 (command line): update 4 would wait for fresher data than train.max_staleness=2",
        ),
    ],
)
def test_impossible_combinations_are_refused(overrides: list[str], expected: str):
    (found,) = problems(None, *overrides)
    assert expected in found


def test_all_tasks_of_a_suite_are_possible():
    assert load_config(None, ["env.suite=libero_90", "env.tasks=[0,89]"]).env == LiberoConfig(
        suite="libero_90", tasks=(0, 89)
    )
    assert LIBERO_TASKS.keys() == STEP_LIMITS.keys()


def test_what_this_machine_lacks_is_refused_only_where_a_machine_is_given(tmp_path: Path):
    absent = tmp_path / "absent"
    overrides = [f"policy.checkpoint={absent}", "learner.ranks=3"]
    load_config(None, overrides)
    checkpoint, ranks = problems(None, *overrides, machine=SMALL_MACHINE)
    assert f"{absent} does not exist" in checkpoint
    assert "learner.ranks=3 (command line): 3 processes for 1 CPU cores; use at most that many" in ranks
    one_gpu = Machine(cpus=64, memory=1 << 38, gpus=(Gpu("any", 1 << 37),))
    (ranks,) = problems(None, "learner.ranks=2", machine=one_gpu)
    assert "has one on each of the learner's 1 GPUs" in ranks
    absent.mkdir()
    assert load_config(None, overrides[:1], machine_checks(SMALL_MACHINE)).policy.checkpoint == str(absent)


@pytest.mark.parametrize("overrides", [["algo=rlpd", "policy=gaussian", "algo.demos"], ["algo.bc_demos"]])
def test_missing_demonstrations_are_refused_at_once(overrides: list[str], tmp_path: Path):
    named = [*overrides[:-1], f"{overrides[-1]}=[{tmp_path},{tmp_path / 'absent'}]"]
    (found,) = problems(None, *named, machine=SMALL_MACHINE)
    assert found.startswith(overrides[-1])
    assert f": {tmp_path / 'absent'} does not exist; name files or folders of demonstrations" in found


def test_a_simulator_on_the_gpu_needs_a_gpu_and_one_task():
    (found,) = problems(None, "env=maniskill", "env.backend=physx_cuda", machine=SMALL_MACHINE)
    assert "env.backend=physx_cuda (command line): torch can use no NVIDIA GPU here; use physx_cpu" in found
    (found,) = problems(None, "env=maniskill", "env.backend=physx_cuda", "env.tasks=[PushCube-v1,PickCube-v1]")
    assert "simulates one of PushCube-v1, PickCube-v1, StackCube-v1 for all environments" in found
    assert "did you mean PushCube-v1?" in problems(None, "env=maniskill", "env.tasks=[PushCub-v1]")[0]
    assert load_config(None, ["env=maniskill"], machine_checks(SMALL_MACHINE)).env.backend == "physx_cpu"


def test_products_of_bfloat16_need_instructions_or_a_gpu(monkeypatch):
    monkeypatch.setattr("vla_rl.placement.checks.multiplies_bf16", lambda: True)
    assert load_config(None, ["learner.matmul=bf16"], machine_checks(SMALL_MACHINE)).learner.matmul == "bf16"
    monkeypatch.setattr("vla_rl.placement.checks.multiplies_bf16", lambda: False)
    (found,) = problems(None, "learner.matmul=bf16", machine=SMALL_MACHINE)
    assert "learner.matmul=bf16 (command line): this processor has no AMX for bfloat16" in found


def test_cuda_graphs_need_a_gpu():
    (found,) = problems(None, "placement.cuda_graphs=true", machine=SMALL_MACHINE)
    assert "placement.cuda_graphs=true (command line): torch can use no NVIDIA GPU here; set it to false" in found


@pytest.mark.parametrize("group", ["placement", "learner"])
def test_compiling_needs_a_compiler(monkeypatch, group):
    compiling = f"{group}.compile_blocks=true"
    monkeypatch.setattr(shutil, "which", lambda name: name == "g++" or None)
    assert load_config(None, [compiling], machine_checks(SMALL_MACHINE))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (found,) = problems(None, compiling, machine=SMALL_MACHINE)
    assert "torch.compile needs a C++ compiler, and there is neither g++ nor clang++" in found


def test_a_file_where_a_checkpoint_folder_should_be_is_refused(file):
    path = file("")
    (found,) = problems(None, f"policy.checkpoint={path}", machine=SMALL_MACHINE)
    assert "is not a folder" in found


def test_a_copy_with_other_values_changes_these_alone():
    config = load_config(None, ["env=tabletop", "policy.lora={}"])
    values = {"train.iterations": 3, "policy.lora.rank": 8, "mode": "sync", "env": TabletopConfig(distractors=2)}
    expected = ["env=tabletop", "env.distractors=2", "policy.lora.rank=8", "mode=sync", "train.iterations=3"]
    assert config.with_values(values) == load_config(None, expected)
    assert config == load_config(None, ["env=tabletop", "policy.lora={}"]), "the original stays the same"
    assert config.with_values({}) == config
    for key in ("train.iteration", "iterations", "train.iterations.more", "env.suite", "algo.groups"):
        with pytest.raises(KeyError, match=f"{key} is not a key"):
            config.with_values({key: 1})


@pytest.mark.parametrize("name", ["1e-4", "null", "true", "2024", "a: b", "plain"])
def test_a_dump_keeps_text_that_looks_like_something_else(file, name: str):
    config = RunConfig.model_validate({"log": {"name": name}, "env": {"name": "tabletop", "tasks": ["push", "reach"]}})
    assert load_config(file(dump_config(config))) == config


def test_a_config_that_comes_along_is_found_by_its_name_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    expected = load_config(ROOT / "configs" / "libero_ppo.yaml")
    for name in ("libero_ppo", "libero_ppo.yaml", "configs/libero_ppo.yaml"):
        assert load_config(name, (), machine_checks(SMALL_MACHINE)) == expected
    assert expected.policy.checkpoint == str(ROOT / "checkpoints" / "libero_spatial_task0")
    assert load_config("recipes/ript_libero").algo.name == "rloo"
    (tmp_path / "mine.yaml").write_text("base: libero_ppo\ntrain: {iterations: 3}\n")
    assert load_config("mine.yaml") == expected.with_values({"train.iterations": 3})
    (tmp_path / "libero_ppo").write_text("seed: 5\n")
    assert load_config("libero_ppo").seed == 5, "a file of the user's comes first"


def test_relative_paths_are_looked_for_beside_their_file_then_here_then_among_what_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    project, here = tmp_path / "project", tmp_path / "here"
    for folder in (project / "one", here / "one", here / "two"):
        folder.mkdir(parents=True)
    (project / "demos.hdf5").touch()
    monkeypatch.chdir(here)
    config = project / "run.yaml"
    config.write_text("policy: {checkpoint: one}\nsft: {demos: [demos.hdf5, none.hdf5]}\n")
    loaded = load_config(config)
    assert loaded.policy.checkpoint == str(project / "one")
    assert loaded.sft.demos == (str(project / "demos.hdf5"), "none.hdf5")
    assert load_config(config, ["policy.checkpoint=one"]).policy.checkpoint == "one", "of the command line: here"
    assert load_config(config, {"policy.checkpoint": Path("two")}).policy.checkpoint == "two"
    given = load_config(config, ["policy.checkpoint=checkpoints/tabletop_reach", "placement.profile=configs/none.yaml"])
    assert given.policy.checkpoint == str(ROOT / "checkpoints" / "tabletop_reach")
    assert given.placement.profile == "configs/none.yaml"


def test_a_mapping_is_read_as_a_file_would_be():
    values = {"env": "tabletop", "train": {"iterations": 3}, "learner": {"betas": (0.9, 0.99)}}
    assert load_config(values) == load_config(None, ["env=tabletop", "train.iterations=3", "learner.betas=[0.9,0.99]"])
    assert load_config(RunConfig().model_dump()) == RunConfig()
    with pytest.raises(ConfigError) as caught:
        load_config({"train": {"iterations": "3"}}, {"trian.seed": 1})
    assert 'train.iterations="3" (argument): must be a whole number, written without' in str(caught.value)
    assert "trian" in str(caught.value)
