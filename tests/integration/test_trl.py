"""Our trainer against TRL's own: tiny random models, a byte tokenizer, nothing from a hub."""

import dataclasses
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, TrlParser

from infinite_sampling.config import ConfigError, RolloutConfig
from infinite_sampling.trainer_rollout import ToolRows, fallback_reason, stream_seed
from infinite_sampling.trl import STATE_FILE, InfiniteGRPOConfig, InfiniteGRPOTrainer, make_rollout_func

# transformers announces the renaming of gradient checkpointing whenever TRL uses it.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning")

PROMPTS = ["two and two", "a", "a", "once upon a time"]
CHAT = [[{"role": "user", "content": text}] for text in PROMPTS]
OURS = {
    f"rollout/{name}"
    for name in ("peak_kv_bytes", "running_steps", "lower_bound_steps", "occupancy", "tokens_per_second")
} | {"rollout/max_logprob_gap"}
TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}


@pytest.fixture
def make(model_path, tokenizer, tmp_path):
    """Builds a trainer of 2 groups of 4 in micro-batches of 2; `seen` collects its completions."""

    def make(trainer_class=InfiniteGRPOTrainer, prompts=PROMPTS, trainer=None, **settings):
        config_class = InfiniteGRPOConfig if trainer_class is InfiniteGRPOTrainer else GRPOConfig
        seen = []

        def reward(completion_ids, **kwargs):
            seen.append([list(ids) for ids in completion_ids])
            return [float(i % 3) for i in range(len(completion_ids))]

        defaults = {
            "output_dir": str(tmp_path / f"out{len(list(tmp_path.iterdir()))}"),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "model_init_kwargs": {"dtype": "float32"},
        }
        built = trainer_class(
            model_path,
            reward,
            config_class(**defaults | settings),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            eval_dataset=Dataset.from_dict({"prompt": prompts[:2]}),
            processing_class=tokenizer,
            **(trainer or {}),
        )
        built.seen = seen
        return built

    return make


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def assert_same_logs(ours, theirs):
    for expected, got in zip(logs_of(theirs), logs_of(ours), strict=True):
        assert set(got) == set(expected) | OURS
        for name in set(expected) - TIMES:
            assert got[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_greedy_completions_and_their_metrics_are_those_of_generate(make):
    # Members of a greedy group are equal, so the gradient is zero: SGD keeps it that way.
    greedy = {"generation_kwargs": {"do_sample": False}, "optim": "sgd"}
    theirs, ours = make(GRPOTrainer, **greedy), make(rollout_num_slots=3, **greedy)
    theirs.train()
    ours.train()
    assert ours.seen == theirs.seen
    assert_same_logs(ours, theirs)
    assert len({len(ids) for ids in ours.seen[0]}) > 1, "the lengths must differ to say anything"


def test_training_on_the_same_completions_is_trls(make):
    ours = make(rollout_num_slots=3, num_iterations=2, max_steps=4, beta=0.1)
    ours.train()
    replayed = iter(ours.seen)

    class Replay(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            return next(replayed), None

    theirs = make(Replay, num_iterations=2, max_steps=4, beta=0.1)
    theirs.train()
    for expected, got in zip(logs_of(theirs), logs_of(ours), strict=True):
        assert set(got) - OURS == set(expected)
        assert {name: got[name] for name in expected if name not in TIMES} == {
            name: value for name, value in expected.items() if name not in TIMES
        }
    for name, weight in theirs.model.named_parameters():
        assert torch.equal(ours.model.get_parameter(name), weight), name


def test_gap_to_the_trainers_forward_is_rounding(make):
    trainer = make(temperature=0.7)
    trainer.train()
    for entry in logs_of(trainer):
        assert 0 < entry["rollout/max_logprob_gap"] < 1e-4
        assert entry["rollout/peak_kv_bytes"] > 0
        assert entry["rollout/running_steps"] >= entry["rollout/lower_bound_steps"] > 0
        assert 0 < entry["rollout/occupancy"] <= 1


def test_gap_shows_a_difference_between_engine_and_trainer(make, monkeypatch):
    trainer = make(max_steps=1)
    sample = trainer._rollout_sampler.sample

    def shifted(*args, **kwargs):
        completions, stats, comparable = sample(*args, **kwargs)
        completions[3] = dataclasses.replace(completions[3], logprobs=[x - 0.5 for x in completions[3].logprobs])
        return completions, stats, comparable

    monkeypatch.setattr(trainer._rollout_sampler, "sample", shifted)
    trainer.train()
    assert logs_of(trainer)[0]["rollout/max_logprob_gap"] == pytest.approx(0.5, abs=1e-3)


def test_gap_is_not_measured_against_changed_weights(make):
    trainer = make(num_iterations=2, max_steps=4)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert ["rollout/max_logprob_gap" in entry for entry in steps] == [True, False, True, False]


def test_gap_after_an_evaluation_is_not_measured_against_changed_weights(make):
    trainer = make(num_iterations=2, max_steps=4, eval_strategy="steps", eval_steps=1)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert ["rollout/max_logprob_gap" in entry for entry in steps] == [True, False, True, False]
    assert trainer.rollout_totals["train"].max_logprob_gap < 1e-4


def test_totals_are_those_of_every_rollout_whatever_is_logged(make):
    every, windows = make(max_steps=3), make(max_steps=3, logging_steps=3)
    for trainer in (every, windows):
        trainer.train()
    totals, logs = windows.rollout_totals["train"], logs_of(every)
    assert totals.running_steps == sum(log["rollout/running_steps"] for log in logs)
    assert totals.lower_bound_steps == sum(log["rollout/lower_bound_steps"] for log in logs)
    assert totals.num_tokens == sum(len(ids) for rows in windows.seen for ids in rows)
    assert totals.tokens_per_second > 0 and totals.max_logprob_gap < 1e-4
    [log] = logs_of(windows)
    assert totals.peak_kv_bytes == log["rollout/peak_kv_bytes"] == max(log["rollout/peak_kv_bytes"] for log in logs)
    assert every.rollout_totals["eval"].num_tokens == 0


def test_the_schedule_changes_no_completion(make):
    seen = []
    for settings in ({"rollout_num_slots": 1}, {"rollout_num_slots": 5}, {"rollout_policy": "micro"}):
        trainer = make(**settings)
        trainer.train()
        seen.append(trainer.seen)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] != seen[0][1]


def test_equal_prompts_and_members_draw_from_streams_of_their_own(make):
    trainer = make(prompts=["a"] * 8, per_device_train_batch_size=8, max_steps=1)
    trainer.train()
    completions = [tuple(ids) for ids in trainer.seen[0]]
    assert len(completions) == 32
    assert len(set(completions)) > 24  # short ones may be equal by chance


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"per_device_train_batch_size": 3, "num_generations": 6}, id="group straddles micro-batches"),
        pytest.param({"gradient_checkpointing": True}, id="gradient checkpointing"),
        pytest.param({"beta": 0.1}, id="reference model"),
        pytest.param({"num_iterations": 2, "max_steps": 3}, id="two iterations"),
        pytest.param({"steps_per_generation": 8, "max_steps": 3}, id="two steps of a generation"),
        pytest.param({"prompts": CHAT}, id="conversational"),
        pytest.param({"trainer": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}}, id="lora"),
        pytest.param({"mask_truncated_completions": True}, id="masked truncated completions"),
        pytest.param({"generation_kwargs": {"min_new_tokens": 3, "stop_strings": ["x"]}}, id="generation_kwargs"),
        pytest.param({"top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}, id="filters"),
    ],
)
def test_trains(make, settings):
    trainer = make(**{"rollout_num_slots": 3} | settings)
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    assert sum("loss" in entry for entry in trainer.state.log_history) == trainer.args.max_steps
    changed = [name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])]
    assert set(changed) == {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert trainer.model.training
    assert logs_of(trainer)[0]["rollout/max_logprob_gap"] < 1e-4


def test_generation_settings_are_followed(make):
    trainer = make(generation_kwargs={"min_new_tokens": 3, "max_new_tokens": 7}, max_steps=1)
    trainer.train()
    lengths = {len(ids) for ids in trainer.seen[0]}
    assert min(lengths) >= 3 and max(lengths) == 7 and len(lengths) > 1


def test_evaluation_has_its_own_group_size_and_streams(make):
    trainer = make(num_generations_eval=2, per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=1)
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 2
    assert {f"eval_{name}" for name in OURS} <= set(evaluations[0])
    assert [len(rows) for rows in trainer.seen] == [8, 4, 8, 4]
    assert trainer._rollout_counts == {"train": 2, "eval": 2}
    without = make()
    without.train()
    assert without.seen == trainer.seen[::2], "evaluating must not move the training streams"


WORKER = """
import json, os, sys
from datasets import Dataset
from infinite_sampling.trl import InfiniteGRPOConfig, InfiniteGRPOTrainer

model, out, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
seen = []

def reward(completion_ids, **kwargs):
    seen.extend(completion_ids)
    return [float(i % 3) for i in range(len(completion_ids))]

config = InfiniteGRPOConfig(
    out, per_device_train_batch_size=batch, gradient_accumulation_steps=2, num_generations=4, max_completion_length=8,
    max_steps=1, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
    model_init_kwargs={"dtype": "float32"}, rollout_num_slots=3,
)
prompts = Dataset.from_dict({"prompt": ["one", "two", "three"]})
trainer = InfiniteGRPOTrainer(model, reward, config, train_dataset=prompts)
trainer.train()
log = {"seen": seen, **trainer.state.log_history[0]}
json.dump(log, open(os.path.join(out, f"rank{trainer.accelerator.process_index}.json"), "w"))
"""


@pytest.mark.slow
def test_two_processes_sample_what_one_samples(model_path, tmp_path):
    logs = {}
    for processes, batch in ((1, 6), (2, 3)):  # a group of 4 straddles two processes of 6 rows
        folder = tmp_path / str(processes)
        folder.mkdir()
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        (folder / "worker.py").write_text(WORKER)
        command = [sys.executable, *launcher, str(folder / "worker.py"), model_path, str(folder), str(batch)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        logs[processes] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]
    (alone,), both = logs[1], logs[2]
    assert both[0]["seen"] + both[1]["seen"] == alone["seen"]
    assert both[0]["rollout/max_logprob_gap"] < 1e-4
    assert both[0]["completions/mean_length"] == alone["completions/mean_length"]


def test_resuming_continues_the_streams(make):
    prompts = [f"{text} {i}" for text in PROMPTS for i in range(2)]  # TRL repeats its order after an epoch's end
    whole = make(prompts=prompts, max_steps=3, save_strategy="steps", save_steps=1)
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    assert json.loads((checkpoint / STATE_FILE).read_text()) == {"train": 2, "eval": 0}
    resumed = make(prompts=prompts, max_steps=3, save_strategy="steps", save_steps=1)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.seen == whole.seen[2:]
    assert resumed._rollout_counts["train"] == 3


def test_event_callback_gets_each_completion_as_it_ends(make):
    events = []
    trainer = make(trainer={"event_callback": lambda event, step: events.append((step, event))})
    trainer.train()
    ended = [(step, event.completion) for step, event in events if event.kind == "finish"]
    assert [step for step, _ in ended] == [0] * 8 + [1] * 8
    assert sorted(c.token_ids for _, c in ended[:8]) == sorted(trainer.seen[0])


def test_logprobs_reach_trl_only_when_asked(make):
    kept = []
    for asked in (False, True):
        trainer = make(rollout_return_logprobs=asked, top_k=8, max_steps=1)
        compute = trainer._compute_loss

        def keep(model, inputs, compute=compute):
            kept.append(inputs)
            return compute(model, inputs)

        trainer._compute_loss = keep
        trainer.train()
    assert "sampling_per_token_logps" not in kept[0]
    ours, drawn = kept[4]["rollout_logprobs"], kept[4]["sampling_per_token_logps"]
    known = ~ours.isnan()
    assert (drawn[known] > ours[known]).all(), "top-k leaves fewer tokens, so each is more likely"


def test_bf16_training_samples_in_bf16(make):
    trainer = make(bf16=True, max_steps=1)
    trainer.train()
    assert trainer._rollout_sampler.engine.config.dtype == "bfloat16"
    assert 1e-6 < logs_of(trainer)[0]["rollout/max_logprob_gap"] < 0.3


def tool_call(tokenizer, number):
    call = json.dumps({"name": "double", "arguments": {"number": number}})
    return tokenizer(f"<tool_call>\n{call}\n</tool_call><|im_end|>")["input_ids"]


def test_tool_turns_keep_the_streams_of_their_rows(make, tokenizer, monkeypatch):
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.

        Returns:
            Twice the number.
        """
        return 2 * number

    trainer = make(
        prompts=CHAT, max_completion_length=400, max_steps=1, per_device_train_batch_size=2, trainer={"tools": [double]}
    )
    real, calls = trainer._rollout_sampler.sample, []

    def sample(trainer, prompt_ids, local_rows, num_local_rows, seed, **kwargs):
        calls.append((local_rows, num_local_rows, seed, kwargs["max_new_tokens"], prompt_ids))
        completions, stats, comparable = real(trainer, prompt_ids, local_rows, num_local_rows, seed, **kwargs)
        callers = {1: [1, 2, 5, 7], 2: [0, 3]}.get(len(calls), [])  # rows of the call that call the tool
        for i in callers:
            ids = tool_call(tokenizer, i)
            zeros = [0.0] * len(ids)
            completions[i] = dataclasses.replace(completions[i], token_ids=ids, logprobs=zeros, sampling_logprobs=zeros)
        return completions, stats, comparable

    monkeypatch.setattr(trainer._rollout_sampler, "sample", sample)
    trainer.train()
    assert [call[0] for call in calls] == [list(range(8)), [1, 2, 5, 7], [1, 7]]
    assert [call[1] for call in calls] == [8, 8, 8]
    assert len({call[2] for call in calls}) == 3
    assert calls[0][3] is None and 0 < calls[2][3] < calls[1][3] < 400
    assert logs_of(trainer)[0]["tools/call_frequency"] == 6 / 8
    assert trainer._rollout_rows is None


def test_a_tool_turn_whose_rows_cannot_be_told_uses_positions():
    rows = ToolRows([[1]], [[2]], [[{"role": "assistant", "content": ""}]], 10)
    assert rows.waiting(2) == [0, 1]


def test_seeds_differ_in_every_part():
    parts = [
        (s, mode, count, turn) for s in (0, 1) for mode in ("train", "eval") for count in (0, 1) for turn in (0, 1)
    ]
    seeds = {stream_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"generation_kwargs": {"no_repeat_ngram_size": 2}}, "no_repeat_ngram_size"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams"),
        ({"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
    ],
)
def test_what_the_engine_cannot_do_goes_to_trl_with_one_warning(make, monkeypatch, settings, reason):
    def theirs(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        return [[260, 258] for _ in prompt_ids], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", theirs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make(**settings)
        trainer.train()
    ours = [str(w.message) for w in caught if "infinite-sampling" in str(w.message)]
    assert len(ours) == 1 and reason in ours[0]
    assert trainer.seen[0] == [[260, 258]] * 8
    assert not OURS & set(logs_of(trainer)[0])


def test_a_model_with_a_generate_of_its_own_goes_to_trl(make):
    trainer = make(max_steps=1)
    trainer.model.generate = lambda input_ids, **kwargs: torch.cat([input_ids, torch.full((8, 3), 258)], dim=1)
    with pytest.warns(UserWarning, match="`generate` of its own"):
        trainer.train()
    assert trainer.seen[0] == [[258]] * 8


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"use_vllm": True}, "use_vllm"),
        ({"use_vllm": False, "use_transformers_continuous_batching": True}, "continuous_batching"),
        ({"use_vllm": False, "use_transformers_continuous_batching": False, "_is_vlm": True}, "images"),
    ],
)
def test_fallback_reasons_known_without_a_model(attributes, reason):
    assert reason in fallback_reason(SimpleNamespace(**attributes))


def test_a_model_with_attention_sinks_goes_to_trl(make):
    trainer = make()
    trainer.model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    assert "sinks" in fallback_reason(trainer)


def test_images_go_to_trl(make, monkeypatch):
    trainer = make()
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self, *args: ("theirs", None))
    with pytest.warns(UserWarning, match="images"):
        assert trainer._generate_single_turn([[1]], [["image"]], {}, 4) == ("theirs", None)


@pytest.mark.parametrize("kind", ["is_fsdp", "is_zero3"])
def test_sharded_weights_are_refused(make, monkeypatch, kind):
    from trl.trainer.grpo_trainer import DistributedBackend

    monkeypatch.setattr(DistributedBackend, kind, property(lambda self: True))
    with pytest.raises(ConfigError, match="whole weights on every process"):
        make()


def test_an_unknown_trl_is_refused(make, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self, prompts: None)
    with pytest.raises(ConfigError, match=r"expected GRPOTrainer._generate_single_turn\(prompt_ids, .*got \(prompts\)"):
        make()


def test_every_rollout_setting_has_its_twin():
    twins = {f.name: f for f in dataclasses.fields(InfiniteGRPOConfig)}
    for setting in dataclasses.fields(RolloutConfig):
        assert twins[f"rollout_{setting.name}"].default == setting.default
    assert all(f.metadata.get("help") for name, f in twins.items() if name.startswith("rollout_"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_policy": "micr"}, "did you mean 'micro'"),
        ({"rollout_num_slots": 0}, "num_slots must be an integer of at least 1"),
        ({"rollout_dtype": "float64"}, "unknown dtype"),
        ({"rollout_policy": "dynamic-slot"}, "favours short completions"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got 0.0: the loss divides by it"),
        ({"temperature": float("inf")}, "temperature must be a finite number above 0, got inf"),
        ({"num_generations": 2.0}, "num_generations must be an integer of at least 1, got 2.0"),
        ({"max_completion_length": None}, "max_completion_length must be an integer of at least 1, got None"),
        ({"weight_decay": float("nan")}, "weight_decay must be a number, got nan"),
    ],
)
def test_a_wrong_setting_fails_at_construction(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        InfiniteGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)


def test_a_wrong_generation_setting_fails_at_construction(make):
    with pytest.raises(ConfigError, match="must not exceed max_new_tokens"):
        make(generation_kwargs={"min_new_tokens": 13})


def test_flags_and_yaml_of_trl_know_the_settings(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nrollout_num_slots: 4\n")
    flags = ["--config", str(file), "--rollout_policy", "micro", "--rollout_logprob_gap", "false"]
    (config,) = TrlParser(InfiniteGRPOConfig).parse_args_and_config(flags)
    assert config.rollout_config() == RolloutConfig(policy="micro", num_slots=4)
    assert config.rollout_logprob_gap is False


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_rollout_func_serves_the_plain_trainer(make):
    ended = []

    def on_event(event, step):
        if event.kind == "finish":
            ended.append(step)

    rollout_func = make_rollout_func(RolloutConfig(num_slots=3), event_callback=on_event)
    trainer = make(GRPOTrainer, prompts=CHAT, trainer={"rollout_func": rollout_func})
    trainer.train()
    assert [len(rows) for rows in trainer.seen] == [8, 8]
    assert ended == [0] * 8 + [1] * 8
    assert trainer.seen[0] != trainer.seen[1]
    again = make(GRPOTrainer, prompts=CHAT, trainer={"rollout_func": make_rollout_func(RolloutConfig(policy="full"))})
    again.train()
    assert again.seen == trainer.seen


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_rollout_func_refuses_what_the_engine_cannot_do(make):
    settings = {"generation_kwargs": {"no_repeat_ngram_size": 2}, "trainer": {"rollout_func": make_rollout_func()}}
    with pytest.raises(ConfigError, match="no_repeat_ngram_size"):
        make(GRPOTrainer, **settings).train()
