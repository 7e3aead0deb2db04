"""State of every training: configuration, ranks, logs, position, checkpoints, resume, outcome.

``train.py`` contains the training. A :class:`Run` does the rest and never calls a model, optimizer or loss::

    run = Run.start(Config, pytorch, __doc__, argv, mlperf.WORDING)
    with run.initialization():
        training = build(run.config, run.ranks, run.saved)
        run.register_state(lambda: {"weights": training.weights})
    run.log(hyperparameters)
    with run.timed(timeline):
        for epoch in run.blocks():                   # a block ends with an evaluation
            for step in run.steps():
                run.report(train_step(training, run.wait_for(batches.next)), learning_rate)
            if run.evaluates():
                run.evaluated(evaluate(training, run))
    return run.finish()

For evaluations that overlap with training (``Timeline.evaluates_concurrently``), call
``run.set_evaluator(evaluator)`` before the loop and ``run.submit_evaluation(predictions)`` instead of
``run.evaluated``.
"""

import operator
import os
import sys
import time
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, List, Mapping, Optional, TypeVar, Union

from benchmarks.common.data.problem import FAILED, REFUSED, Problem
from benchmarks.common.records import Checkpoint, CheckpointWritten, End, Evaluation, Start
from benchmarks.common.run import caches, choices, configuration, evidence, startup
from benchmarks.common.run.checkpoints import Checkpoints, Content
from benchmarks.common.run.metrics import MetricsStream, StepReports, library_environment
from benchmarks.common.run.mllog import Wording, log_of
from benchmarks.common.run.pending import Begun, PendingEvaluations, Result, pause
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.step_times import StepTimes, threads
from benchmarks.common.run.stopping import Heartbeat, StopRequest, leaving_together
from benchmarks.common.run.timeline import Timeline

T = TypeVar("T")
COMPILED = "compiled.bin"  # compiler cache in the output folder, shared with earlier and later runs


class Run:
    """One training on one rank, from command line to exit code. Create it with ``start``."""

    def __init__(
        self, config: Any, framework: Any, data: Path, output: Path, wording: Wording, reshards: bool = False
    ) -> None:
        """Join the other ranks and find out where the run is; the signals come first."""
        self._stop = StopRequest()
        choices.forget()
        startup.reset()
        self._framework, self.data, self.output = framework, data, output
        threads_before = threads()
        with startup.part("ranks"):
            caches.set_cuda_cache(os.environ)
            self.ranks: Ranks = framework.start(config)
            self._communicating = threads() - threads_before if config.device == "cpu" else None
            framework.load_compiled(output / COMPILED, self.ranks)
        memory = framework.memory(self.ranks.context)
        self.open(lambda: configuration.reject_mismatches(config, data, self.ranks.size, memory))
        self._heartbeat = Heartbeat(output / "heartbeat", self.ranks.rank)
        self._wording, self._paths = wording, (output / "result.txt", output / "metrics.jsonl")
        self._checkpoints = Checkpoints(output / "checkpoint", self._paths, framework, self.ranks, reshards)
        with leaving_together(self._framework):
            state = self._checkpoints.find()
        self._choices: Dict[str, Any] = state.get("choices", {})  # of the run that is resumed
        self.config = choices.restore(config, self._choices)
        self.position: int = state.get("step", 0)  # steps that are done
        self._evaluated: int = state.get("evaluated", 0)  # position of the last evaluation
        self._reached: bool = state.get("reached", False)
        self._inside_step: bool = state.get("inside_step", False)  # the next step has started
        self._losses: List[float] = state.get("losses", [])  # of steps since the last record of the metrics stream
        self._pending = PendingEvaluations(self._log_later, state.get("pending", []))
        self.register_state(dict)
        self.on_skipped_steps(int)
        self._ended = self.interrupted = self._failed = self._part_is_open = self._evaluates_later = False
        self._logs_events = not self.resumed

    @classmethod
    def start(
        cls,
        config_class: Any,
        framework: Any,
        description: Optional[str],
        argv: Optional[List[str]],
        wording: Wording,
        reshards: bool = False,
    ) -> "Run":
        """Parse the command line of ``train.py`` and start the run; the log has the format of config.round.

        ``reshards``: resume from a checkpoint with a different number of ranks, see Checkpoints.load.
        """
        arguments = configuration.arguments(description, argv)
        config = configuration.load(config_class, arguments.config)
        return cls(config, framework, arguments.data, arguments.output, wording, reshards)

    # MLPerf log in the format of the round, opened on first use
    @cached_property
    def _log(self) -> Any:
        return log_of(self._wording, self._paths[0], self.ranks.rank, self.config.round)

    # -- checkpoints -------------------------------------------------------------------------------------

    @property
    def resumed(self) -> bool:
        """Whether this run continues from a checkpoint."""
        return self._checkpoints.found is not None

    @property
    def saved(self) -> Dict[str, Any]:
        """Shared and local checkpoint content of this rank; empty for a new run."""
        return self._checkpoints.load()

    def register_state(self, shared: Content, local: Content = dict) -> None:
        """Set the checkpoint content: ``local`` is called on every rank, then ``shared`` on rank 0."""
        self._shared, self._own = shared, local

    @property
    def choices(self) -> Dict[str, Any]:
        """This run's resolved "auto" settings, and its device's TF32."""
        return {**choices.resolved(self.config, self._choices), **self._framework.arithmetic(self.ranks)}

    def _save(self, kind: str = "step", concurrently: bool = False) -> None:
        state: Dict[str, Any] = {"step": self.position, "evaluated": self._evaluated, "reached": self._reached}
        state.update(losses=list(self._reports.losses), inside_step=self._inside_step)
        state["choices"] = self.choices
        state["pending"] = self._pending.saved() if self._evaluates_later else []
        began = time.time()
        self._note_writing(waits=True)
        if concurrently:
            self._checkpoints.save_async(self.position, state, self._shared, self._own)
            self._written = self.position
        else:
            self._checkpoints.save(self.position, state, self._shared, self._own, kind)
        self._metrics.write(Checkpoint(self.position, round(time.time() - began, 3)))

    # Record that an asynchronous save ended; raise its error, if any.
    def _note_writing(self, waits: bool = False) -> None:
        seconds = self._checkpoints.poll_save(waits)
        if seconds is not None:
            self._metrics.write(CheckpointWritten(self._written, round(seconds, 3)))

    def log(self, events: Mapping[str, Any]) -> None:
        """Log all items as events, in order; a no-op for a resumed run, whose log already has them."""
        if self._logs_events:
            for key, value in events.items():
                self._log.event(key, value)

    @contextmanager
    def initialization(self) -> Iterator[None]:
        """Log the block as the untimed initialization (MLPerf training rules, "timing")."""
        if self._logs_events:
            self._log.init_start(self.config.seed)
        try:
            with startup.part("network"):
                yield
        except choices.UnavailableError as problem:  # raised on all ranks together
            print(problem, file=sys.stderr)
            with leaving_together(self._framework):
                raise SystemExit(REFUSED) from None
        if evidence.required_by(self.config.round):
            self.log(evidence.log_keys(self.config, self.choices))
        if self._logs_events:
            self._log.init_stop(self.choices)

    @contextmanager
    def timed(
        self, timeline: Union[Timeline, Callable[[], Timeline]], flops: Optional[Callable[[], float]] = None
    ) -> Iterator[Timeline]:
        """Run the clock during the block: reading the data set and training (MLPerf training rules, "timing").

        The clock starts when all ranks are connected and their devices idle, and no rank continues before rank 0 has
        logged it; it stops when all ranks and devices are finished. Yields the timeline. A timeline that depends on
        the data set is a function, called after the clock has started; so is ``flops``, the model FLOPs for training
        on one sample (benchmarks/common/flops.py), in the batch unit of the timeline.
        """
        with startup.part("connect"):
            self._framework.connect(self.ranks)
            self._framework.synchronize()
            self._framework.barrier()
        self._startup = {"seconds": startup.seconds_by_part(), "budget": startup.BUDGET}
        if self._logs_events:
            self._log.run_start()
        self._framework.barrier()
        self._timeline = timeline if isinstance(timeline, Timeline) else timeline()
        self._flops = flops() if flops is not None and self.ranks.rank == 0 else None
        try:
            yield self._timeline
            self._end()
        finally:
            self._pending.close()

    def _end(self) -> None:
        if self.interrupted or self._failed:
            self._save()
        else:
            self._framework.synchronize()
            self._framework.barrier()
            self._log.run_stop(self._reached)
            self._pending.finish()
            self._note_writing(waits=True)
            if self.config.checkpoint_interval:  # after the clock has stopped; read by `encore export`
                self._save("trained")
        if self._failed:
            with leaving_together(self._framework):
                raise SystemExit(str(self._pending.problem) if self._pending.problem else FAILED)
        self._metrics.write(End("interrupted" if self.interrupted else "reached" if self._reached else "not_reached"))

    def open(self, call: Callable[[], T]) -> T:
        """Return the data set opened by ``call``; report a problem once and exit on all ranks."""
        try:
            return call()
        except Problem as problem:
            if self.ranks.rank == 0:
                print(problem, file=sys.stderr)
            raise SystemExit(problem.code) from None

    def finish(self) -> int:
        self._framework.save_compiled(self.output / COMPILED, self.ranks)
        self._framework.finish()
        return 0

    # -- the loop ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the next step, or of the evaluation that comes before it, counted from 0."""
        return (self.position - self._evaluation_is_due()) // self._timeline.steps_per_epoch

    @property
    def starts_epoch(self) -> bool:
        return not self._evaluation_is_due() and self.position % self._timeline.steps_per_epoch == 0

    def blocks(self) -> Iterator[int]:
        """Yield the epoch, from 0, in which each block starts; a block ends with an evaluation.

        A resumed run continues where it was interrupted: in a block, or with its evaluation.
        """
        timeline, sums = self._timeline, self._framework.LaggedSums(self.ranks, "step")
        wait = self._framework.input_wait(self.ranks)
        global_batch = self.config.batch_size * (timeline.data_parallel_ranks or self.ranks.size)
        self._metrics = MetricsStream(self._paths[1], self.ranks.rank)
        self._metrics.write(
            Start(
                ranks=self.ranks.size,
                global_batch_size=global_batch,
                batch_unit=timeline.batch_unit,
                epochs=timeline.epochs,
                steps_per_epoch=timeline.steps_per_epoch,
                targets=self.config.targets,
                resumed_step=self.position,
                damaged=self._checkpoints.damaged,
                environment=library_environment(),
                choices=self.choices,
                evidence=evidence.log_keys(self.config, self.choices),
                flops_per_sample=self._flops,
                gemm_precision=evidence.gemm_precision(self.config),
                startup=self._startup,
            )
        )
        steps, interval = timeline.steps_per_epoch, self.config.log_interval
        self._reports = StepReports(self._metrics, sums, wait, self.ranks, global_batch, steps, interval, self._losses)
        self._times = StepTimes(self.output / "steps", self.ranks, wait, self._communicating)
        self._logs_events = True
        self._checkpoints.mark_logs()
        self._stop.arm()
        while not self._ended and (self._evaluation_is_due() or self.position < timeline.steps):
            if not self._evaluation_is_due():
                self._open_part()
            yield self.epoch
            if self._evaluation_is_due() and not self._ended:
                raise RuntimeError("the evaluation of this block was not reported")
        self._wait_for_results()
        self._times.end()

    def steps(self) -> Iterator[int]:
        for steps in self.step_ranges(1):
            yield steps.start

    def step_ranges(self, limit: int) -> Iterator[range]:
        """Yield ranges of up to ``limit`` steps in one epoch; report each range once."""
        timeline = self._timeline
        while not self._ended and self.position < timeline.steps and not self._evaluation_is_due():
            self._open_part()
            end_of_epoch = (self.position // timeline.steps_per_epoch + 1) * timeline.steps_per_epoch
            last = min(self.position + limit, end_of_epoch)
            last = next((s for s in range(self.position + 1, last) if timeline.evaluates_after(s)), last)
            self._current = range(self.position, last)
            yield self._current
            if self._inside_step:
                self._part_is_open = False
                self._times.stop()
                with leaving_together(self._framework):
                    self._reports.end(self.epoch)
                self._checkpoints.mark_logs()
                return
            self.position = last
            if self._evaluation_is_due():
                self.position -= self._skipped()
            if self._ended or self._evaluation_is_due() or self.position == end_of_epoch:
                self._close_part()

    def report(self, loss: Any, learning_rate: Any, samples: Optional[int] = None) -> None:
        """Report the current step or range of steps.

        Args:
            loss: mean over this rank's samples, a tensor on the device, read asynchronously; None if ``interruptible``
                ended within the step, which a resumed run repeats.
            learning_rate: of the (last) step: a number, or a tensor on the device, read asynchronously.
            samples: of all ranks; default: the global batch size.
        """
        self._heartbeat.beat(self._current.stop - 1)
        if loss is None:
            self._inside_step = True
            return
        self._times.add(self._current)
        self._note_writing()
        with leaving_together(self._framework):
            stop = self._reports.add(self._current, loss, self._wants_to_stop(), learning_rate, samples)
        if stop:
            self._agree()

    def on_skipped_steps(self, skipped: Callable[[], int]) -> None:
        """Exclude steps without a weight update from the count; ``skipped`` returns their number since its last call.

        It is called when an evaluation is due, which waits for the device anyway; the position is then reduced by
        that number.
        """
        self._skipped = skipped

    def wait_for(self, call: Callable[[], T]) -> T:
        with self._times.fetching():
            return self._reports.wait_for(call)

    def stage(self, name: str) -> ContextManager[None]:
        return self._reports.stage(name)

    def _evaluation_is_due(self) -> bool:
        return self._evaluated < self.position and self._timeline.evaluates_after(self.position)

    # Start an epoch part: its timer, and the log lines that start an epoch or block.
    def _open_part(self) -> None:
        if self._part_is_open:
            return
        self._part_is_open = True
        timeline, (epoch, done) = self._timeline, divmod(self.position, self._timeline.steps_per_epoch)
        if done == 0 and not self._inside_step:
            if epoch == 0 or timeline.evaluates_inside_epochs or timeline.evaluates_after(self.position):
                self._log.block_start(epoch, timeline.block_epochs(epoch))
            self._log.epoch_start(epoch)
        self._inside_step = False
        self._reports.start()
        self._times.start()

    # End an epoch part: at its end, at an evaluation, or when the run stops.
    def _close_part(self) -> None:
        self._part_is_open = False
        self._times.stop()
        epoch, done = divmod(self.position - 1, self._timeline.steps_per_epoch)
        with leaving_together(self._framework):
            if self._reports.end(epoch) and not self._ended:
                self._agree()
        if done + 1 == self._timeline.steps_per_epoch:
            if not self._timeline.evaluates_inside_epochs:
                self._log.epoch_stop(epoch)
            if not self._evaluation_is_due():
                self._end_position()
        self._checkpoints.mark_logs()

    # Finish a position: the epoch's end if the epoch contains its evaluations, and checkpoint.
    def _end_position(self) -> None:
        timeline, (epoch, done) = self._timeline, divmod(self.position, self._timeline.steps_per_epoch)
        stops = self._reached and timeline.stops_at_target and not timeline.evaluates_concurrently
        if timeline.evaluates_inside_epochs and (done == 0 or stops):
            self._log.epoch_stop(epoch - (done == 0))
            self._log.block_stop(epoch - (done == 0))
        self._checkpoints.mark_logs()
        if stops:
            self._ended = True
        elif timeline.checkpoints_after(self.position):
            self._save(concurrently=getattr(self.config, "async_checkpoints", False))

    # -- evaluations -------------------------------------------------------------------------------------

    def evaluates(self) -> bool:
        """Return whether the evaluation of this block starts now, and log its start."""
        if self._ended or not self._evaluation_is_due():
            return False
        # One evaluation at a time: the v0.6 checker rejects overlapping evaluations.
        if (self._timeline.evaluates_concurrently and self._wait_for_results()) or self._ended:
            return False
        self._evaluation = self._start_evaluation(self.position, self.epoch)
        return True

    def interruptible(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the evaluation batches; stop early on all ranks (``interrupted``) after a stop request.

        All ranks need the same number of batches. Long steps can have interruptible parts, too: see ``report``.
        """
        votes = self._framework.LaggedSums(self.ranks, "stop_evaluation")
        for batch in batches:
            yield batch
            self._heartbeat.beat(self.position)
            sums = votes.send(None, self._stop.requested)
            if sums is not None and sums[1] > 0:
                self.interrupted = self._ended = True
                break
        votes.drain()

    def total(self, values: Any, expected: int) -> List[float]:
        """Sum ``values`` over all ranks; the last value counts samples and must sum to ``expected``."""
        sums: List[float] = self._framework.total(values)
        count = sums.pop()
        if count != expected:
            raise RuntimeError(f"evaluated {count:.0f} samples, the data set has {expected}")
        return sums

    def evaluated(self, results: Optional[Mapping[str, float]]) -> None:
        """Log an evaluation's result, None if it was interrupted; decide whether the run continues.

        ``results`` has a value for each target in the configuration, and optional other figures.
        """
        if results is None:
            return
        self._reached |= self._stop_evaluation(self._evaluation, results)
        self._evaluated = self.position
        self._end_position()

    def evaluated_after_clock(self, epoch: int, results: Mapping[str, float]) -> bool:
        """Log the result of the model saved after ``epoch``, from 1; return whether it reached all targets."""
        evaluation = self._start_evaluation(epoch * self._timeline.steps_per_epoch, epoch - 1)
        self._reached = self._stop_evaluation(evaluation, results)
        return self._reached

    # Log an evaluation's start after ``epoch``, from 0; with concurrent evaluation the block ends before it.
    def _start_evaluation(self, position: int, epoch: int) -> Begun:
        timeline = self._timeline
        if timeline.evaluates_concurrently and not timeline.evaluates_inside_epochs:
            self._log.block_stop(timeline.first_of_block(epoch))
        self._log.eval_start(timeline.epoch_num(position))
        return Begun(position, epoch + 1, time.time())

    # Log an evaluation's end and results; return whether they reach all targets.
    def _stop_evaluation(self, evaluation: Begun, results: Mapping[str, float]) -> bool:
        timeline, targets = self._timeline, self.config.targets
        qualities = {name: results[name] for name in targets}
        figures = {name: value for name, value in results.items() if name not in targets}
        self._log.eval_stop(timeline.epoch_num(evaluation.position), qualities, targets)
        if not (timeline.evaluates_inside_epochs or timeline.evaluates_concurrently):
            self._log.block_stop(timeline.first_of_block(evaluation.epoch - 1))
        seconds = round(time.time() - evaluation.started, 3)
        self._metrics.write(Evaluation(evaluation.epoch, qualities, seconds, evaluation.position), **figures)
        reached = operator.gt if timeline.target_is_exceeded else operator.ge
        reached = operator.le if timeline.lower_is_better else reached
        return all(reached(qualities[name], target) for name, target in targets.items())

    # -- evaluations by an evaluator: see benchmarks/common/run/pending.py ------------------------------------

    def set_evaluator(self, evaluator: Any) -> None:
        """Set the evaluator for ``submit_evaluation``; a resumed run's pending evaluations restart."""
        self._evaluates_later = True
        if self.ranks.rank == 0:
            self._pending.open(evaluator, self._reached and self._timeline.stops_at_target)

    def submit_evaluation(self, predictions: Any) -> None:
        """Pass ``predictions`` to the evaluator on rank 0; wait for its result unless it works concurrently."""
        if self.interrupted:
            return
        self._pending.start(self._evaluation, predictions)
        if not self._timeline.evaluates_concurrently and self._wait_for_results():
            self._pending.forget()  # interrupted: the resumed run repeats the evaluation
            return
        self._evaluated = self.position
        self._end_position()

    def _log_later(self, evaluation: Begun, results: Result) -> bool:
        self._reached |= self._stop_evaluation(evaluation, results)
        return self._reached and self._timeline.stops_at_target

    # Log available results; return whether this rank received a stop request or a result ends the run.
    def _wants_to_stop(self) -> bool:
        if self._pending.collect():
            self._checkpoints.mark_logs()
        return self._stop.requested or any(self._pending.votes[:2])

    # Agree with all ranks whether and why the run ends; return whether a result is pending.
    def _agree(self) -> bool:
        self._wants_to_stop()
        votes = self._framework.total(list(map(float, (self._reached, self._stop.requested, *self._pending.votes))))
        self._reached, requested, ends, failed, waiting = (vote > 0 for vote in votes)
        self.interrupted = requested and not ends
        self._failed = failed and not (ends or requested)
        self._ended |= ends or requested or failed
        return waiting

    # Wait until all results are available or the run ends; return whether a result is pending.
    def _wait_for_results(self) -> bool:
        waiting = self._evaluates_later
        while waiting and not self._ended:
            waiting = self._agree()
            if waiting:
                self._heartbeat.beat(self.position)
                pause()
        return waiting
