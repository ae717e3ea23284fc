"""Names of the files in a run folder (`ludic.run.folder` shows the tree). Readers of run folders import only this."""

CONFIG, METRICS, ROLLOUTS, TRAINED = "config.toml", "metrics.jsonl", "rollouts", "trained"
CHECKPOINTS = "checkpoints"
WANDB_ID, SERVER, FAILURE = "wandb_id", "server", "failure.json"
WEIGHTS, REDIS, LOGS = "weights", "redis", "logs"
