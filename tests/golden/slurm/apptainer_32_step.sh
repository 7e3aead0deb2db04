#!/usr/bin/env bash
cd /encore && env -i HOME=/home/me PATH=/usr/bin:/bin USER=me PYTHONUNBUFFERED=1 HOROVOD_CONTROLLER=mpi HOROVOD_CPU_OPERATIONS=mpi APPTAINERENV_PYTHONUNBUFFERED=1 APPTAINERENV_HOROVOD_CONTROLLER=mpi APPTAINERENV_HOROVOD_CPU_OPERATIONS=mpi APPTAINERENV_PYTHONNOUSERSITE=1 APPTAINERENV_PYTHONPATH=/workspace/encore \
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
  --cpu-bind=none apptainer run \
  --home /tmp \
  --pwd /workspace/encore \
  --nv \
  --bind /data/imagenet:/data/imagenet:ro \
  --bind /results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0:/results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0:rw \
  --bind /var/spool/slurmd:/var/spool/slurmd:rw /images/resnet.sif python -m benchmarks.resnet.mxnet.train \
  --config /results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0/config.json \
  --data /data/imagenet \
  --output /results/TIME-resnet-mxnet-dgxa100-jobJOB/experiment_0
