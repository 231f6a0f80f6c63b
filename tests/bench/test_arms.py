"""What the arms of a comparison are served with."""

import json
from pathlib import Path

from bench.demo.run import server_config
from bench.demo.workload import Workload
from bench.serving.arms import ARMS

WORKLOAD = Workload(
    name="w",
    seed=0,
    calls=(),
    gpu_blocks=33,
    tier_blocks=57,
    max_model_len=1024,
    parameters={},
)


def test_only_our_tier_records(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    recording = tmp_path / "recording.jsonl"
    for name, arm in ARMS.items():
        plain = server_config(arm, WORKLOAD, tmp_path)
        recorded = server_config(arm, WORKLOAD, tmp_path, recording)
        assert str(recording) not in json.dumps(plain.command(1))
        assert (str(recording) in json.dumps(recorded.command(1))) == (name == "evoke")
        assert recorded.command(1)[-2:] == ["--shutdown-timeout", "5"]
