#!/usr/bin/env bash
cd /encore && env -i HOME=/home/me USER=me LOGNAME=me PATH=/cache/mxnet/bin:/usr/bin:/bin PYTHONPATH=/encore PYTHONUNBUFFERED=1 HOROVOD_CONTROLLER=mpi HOROVOD_CPU_OPERATIONS=mpi OMP_NUM_THREADS=8 OMP_WAIT_POLICY=PASSIVE HOROVOD_CYCLE_TIME=10 OMPI_MCA_mpi_yield_when_idle=1 \
  srun \
  --nodes=1 \
  --ntasks=2 \
  --ntasks-per-node=2 \
  --mpi=pmix \
  --distribution=block \
  --export=ALL \
  --kill-on-bad-exit=1 \
  --input=none \
  --open-mode=truncate \
  --output=/results/TIME-resnet-mxnet-cpu-jobJOB/experiment_0/ranks/rank.%t/stdout \
  --error=/results/TIME-resnet-mxnet-cpu-jobJOB/experiment_0/ranks/rank.%t/stderr \
  --cpu-bind=none python -m benchmarks.resnet.mxnet.train \
  --config /results/TIME-resnet-mxnet-cpu-jobJOB/experiment_0/config.json \
  --data /data/d \
  --output /results/TIME-resnet-mxnet-cpu-jobJOB/experiment_0
