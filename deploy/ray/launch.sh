#!/bin/bash
# A pipeline on a Ray cluster that is running: Ray decides where learner and actors go, by the GPUs that they ask for here, and by
# --learner-resources and --actor-resources, which may follow run.toml (docs/pipeline.md).
#
#   LUDIC_REDIS_URL=redis://:PASSWORD@HOST:6380/0 deploy/ray/launch.sh run.toml
#
# To be run on a machine of the cluster, from a folder that all its machines share.
# Ray's own port is 6379 as well as Redis's, so this Redis listens on another (redis-server --port 6380 --requirepass PASSWORD).
# A cluster that wants a token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here, too.
# A cluster of hosts a and b (scripts/two_hosts.py runs this):
#
#   a$ ray start --head --port=6379 --node-ip-address=10.77.0.1 --resources='{"host_a": 1}'
#   b$ ray start --address=10.77.0.1:6379 --node-ip-address=10.77.0.2 --resources='{"host_b": 1}'
set -euo pipefail
: "${LUDIC_REDIS_URL:?the URL of a Redis that every machine of the cluster reaches}"
exec ludic launch "${1:?usage: deploy/ray/launch.sh run.toml}" --ray --learner-gpus 1 --actor-gpus 1 --actors 4 "${@:2}"
