#!/usr/bin/env bash
cd /encore && env -i HOME=/tmp PATH=/usr/bin:/bin USER=me PYTHONUNBUFFERED=1 HOROVOD_CONTROLLER=mpi HOROVOD_CPU_OPERATIONS=mpi PYTHONNOUSERSITE=1 PYTHONPATH=/workspace/encore NVIDIA_VISIBLE_DEVICES=all \
  srun \
  --nodes=32 \
  --ntasks=256 \
  --ntasks-per-node=8 \
  --mpi=pmix \
  --distribution=block \
  --export=ALL \
  --kill-on-bad-exit=1 \
  --input=none \
  --open-mode=truncate \
  --output=/results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0/ranks/rank.%t/stdout \
  --error=/results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0/ranks/rank.%t/stderr \
  --cpu-bind=none \
  --container-image=/images/resnet.sqsh \
  --container-mounts=/data/imagenet:/data/imagenet:ro,/results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0:/results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0:rw \
  --container-workdir=/workspace/encore \
  --container-env=HOME,HOROVOD_CONTROLLER,HOROVOD_CPU_OPERATIONS,PYTHONNOUSERSITE,PYTHONPATH,PYTHONUNBUFFERED \
  --no-container-mount-home \
  --no-container-remap-root python -m benchmarks.resnet.mxnet.train \
  --config /results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0/config.json \
  --data /data/imagenet \
  --output /results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0
