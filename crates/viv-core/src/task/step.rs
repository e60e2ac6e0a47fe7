//! The one way by which a task changes.

use super::{
    Came, EffectOutcome, Ending, GRANTS_MAX, Grant, Mark, RUNS_MAX, StopAsked, Task, TaskCause, TaskExecution,
};
use super::{TaskState, TaskTimes};
use crate::exec::{ExecSpec, ExecState};
use crate::id::{ExecutionId, Generation, RequestId, SandboxId};
use crate::lifecycle::Actor;
use crate::planted::{Planted, is_planted};

/// What happens to a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskEvent {
    /// Its turn has come.
    TakenUp,
    /// Its sandbox is ready.
    Entered {
        /// In this generation.
        generation: Generation,
        /// How it came by it.
        came: Came,
    },
    /// A sandbox takes the place of one that is gone.
    Moved {
        /// Which.
        to: SandboxId,
    },
    /// It is about to start an execution.
    Starting {
        /// Of this step; none prepares.
        step: Option<u32>,
    },
    /// An execution was seen to run.
    Started {
        /// Which.
        execution: ExecutionId,
    },
    /// What prepares has ended.
    PrepareEnded {
        /// How.
        ended: ExecState,
    },
    /// Its sandbox is filled.
    Prepared,
    /// It wrote something.
    Output,
    /// The agent says how far it is.
    Reported {
        /// By this request.
        request: RequestId,
        /// So many steps more.
        steps: u64,
        /// In words.
        note: Option<String>,
        /// Its own session.
        session: Option<String>,
    },
    /// The gate is asked for an effect (K5).
    Asked {
        /// By this request.
        request: RequestId,
        /// Which.
        effect: String,
        /// Whether the gate is there at all (O9).
        gated: bool,
    },
    /// An effect has ended.
    EffectEnded {
        /// That which this request was granted.
        request: RequestId,
        /// Why it failed, if it did.
        failed: Option<String>,
    },
    /// A step has ended.
    StepEnded {
        /// Which.
        step: u32,
        /// How.
        ended: ExecState,
    },
    /// Somebody wants it to stop.
    Stop {
        /// Who.
        by: Actor,
    },
    /// It may go no further.
    LimitPassed {
        /// Which limit.
        cause: TaskCause,
        /// In words.
        message: String,
    },
    /// Its sandbox could not be made ready, or filled.
    NotPrepared {
        /// Why.
        what: String,
    },
    /// Its instance is not there any more.
    Gone {
        /// Why.
        what: String,
    },
    /// Its way out was cut.
    Cut,
    /// Everything that it started was seen to be gone.
    Killed {
        /// How each ended, of those of which that was seen.
        ended: Vec<(ExecutionId, ExecState)>,
    },
    /// So is all that was to go.
    Confirmed,
    /// It is to go on.
    Continued {
        /// With these steps.
        steps: Vec<ExecSpec>,
        /// Within these limits.
        limits: super::TaskLimits,
        /// Whether its sandbox stays after that.
        keep_alive: bool,
    },
    /// Somebody says that it should not have been ended, or takes that back (O2).
    Marked {
        /// Who.
        by: Actor,
        /// Whether it should not have been.
        mistaken: bool,
        /// In words.
        why: Option<String>,
    },
}

/// Why something is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskDenial {
    /// It is over.
    Over,
    /// It is not over.
    NotOver,
    /// It is to end.
    Ending,
    /// It does not run.
    NotRunning,
    /// There is no such effect among those that it declared.
    Undeclared,
    /// The effect was done, and is not repeatable.
    DoneBefore,
    /// What came of the effect is not known, so it is not repeated.
    Unknown,
    /// Another effect is in flight.
    Busy,
    /// There were as many as there may be.
    TooMany,
    /// There is no such grant.
    NoGrant,
    /// It was not kept, so there is nothing to go on with.
    NotKept,
    /// It ended by itself, so nobody can have been mistaken.
    NotEnded,
}

/// What came of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskStepped {
    /// It is so now.
    Accepted(Box<Task>),
    /// It is as it was.
    Ignored,
    /// It may not be.
    Denied(TaskDenial),
}

/// What becomes of a task. Total: every event in every state.
pub fn step(task: &Task, event: &TaskEvent, now_ms: u64) -> TaskStepped {
    if task.state.is_final() {
        return over(task, event, now_ms);
    }
    let mut next = task.clone();
    match living(&mut next, event, now_ms) {
        Err(denial) => TaskStepped::Denied(denial),
        Ok(()) if next == *task => TaskStepped::Ignored,
        Ok(()) => {
            next.version += 1;
            TaskStepped::Accepted(Box::new(next))
        }
    }
}

/// What is over stays as it is, unless it is continued.
fn over(task: &Task, event: &TaskEvent, now_ms: u64) -> TaskStepped {
    match event {
        TaskEvent::Continued { steps, limits, keep_alive } => {
            if !task.keep_alive {
                return TaskStepped::Denied(TaskDenial::NotKept);
            }
            if task.run >= RUNS_MAX {
                return TaskStepped::Denied(TaskDenial::TooMany);
            }
            let next = Task {
                version: task.version + 1,
                run: task.run + 1,
                state: TaskState::Queued,
                steps: steps.clone(),
                limits: *limits,
                keep_alive: *keep_alive,
                step: 0,
                came: None,
                executions: Vec::new(),
                ending: None,
                stop: None,
                reported: 0,
                note: None,
                deadline_ms: None,
                mark: None,
                times: TaskTimes { requested_at_ms: now_ms, ..TaskTimes::default() },
                ..task.clone()
            };
            TaskStepped::Accepted(Box::new(next))
        }
        TaskEvent::Marked { by, mistaken, why } => marked(task, by, *mistaken, why.as_ref(), now_ms),
        TaskEvent::Asked { .. } | TaskEvent::Reported { .. } => TaskStepped::Denied(TaskDenial::Over),
        TaskEvent::EffectEnded { request, .. } => known(task, request),
        TaskEvent::TakenUp
        | TaskEvent::Entered { .. }
        | TaskEvent::Moved { .. }
        | TaskEvent::Starting { .. }
        | TaskEvent::Started { .. }
        | TaskEvent::PrepareEnded { .. }
        | TaskEvent::Prepared
        | TaskEvent::Output
        | TaskEvent::StepEnded { .. }
        | TaskEvent::Stop { .. }
        | TaskEvent::LimitPassed { .. }
        | TaskEvent::NotPrepared { .. }
        | TaskEvent::Gone { .. }
        | TaskEvent::Cut
        | TaskEvent::Killed { .. }
        | TaskEvent::Confirmed => TaskStepped::Ignored,
    }
}

/// Said again it is the same, unless for another reason.
fn marked(task: &Task, by: &Actor, mistaken: bool, why: Option<&String>, now_ms: u64) -> TaskStepped {
    if !task.was_ended() {
        return TaskStepped::Denied(TaskDenial::NotEnded);
    }
    let mark = match (&task.mark, mistaken) {
        (None, false) => return TaskStepped::Ignored,
        (Some(mark), true) if why.is_none() || mark.why.as_ref() == why => return TaskStepped::Ignored,
        (Some(_), false) => None,
        (None | Some(_), true) => Some(Mark { by: by.clone(), at_ms: now_ms, why: why.cloned() }),
    };
    TaskStepped::Accepted(Box::new(Task { version: task.version + 1, mark, ..task.clone() }))
}

fn known(task: &Task, request: &RequestId) -> TaskStepped {
    let known = task.grants.iter().any(|grant| grant.request == *request);
    if known { TaskStepped::Ignored } else { TaskStepped::Denied(TaskDenial::NoGrant) }
}

fn living(task: &mut Task, event: &TaskEvent, now_ms: u64) -> Result<(), TaskDenial> {
    match event {
        TaskEvent::TakenUp if task.state == TaskState::Queued && task.ending.is_none() => {
            task.state = TaskState::Preparing;
            task.times.taken_up_at_ms = Some(now_ms);
            task.deadline_ms = task.limits.total_ms.map(|total_ms| now_ms.saturating_add(total_ms));
        }
        TaskEvent::Moved { to } if is_preparing(task) => {
            task.sandbox = to.clone();
            task.made += 1;
            // The generations of another sandbox are counted anew.
            task.generation = None;
        }
        TaskEvent::Entered { generation, came } if is_preparing(task) => {
            task.generation = Some(*generation);
            task.came = Some(*came);
            if *came == Came::Recreated {
                task.session = None;
            }
        }
        TaskEvent::Starting { step } if task.ending.is_none() => starting(task, *step),
        TaskEvent::Started { execution } => started(task, execution, now_ms),
        TaskEvent::PrepareEnded { ended } => end_execution(task, None, ended),
        TaskEvent::Prepared if is_preparing(task) => {
            task.state = TaskState::Running;
            task.times.prepared_at_ms = Some(now_ms);
        }
        TaskEvent::Output if task.times.output_at_ms.is_none() => task.times.output_at_ms = Some(now_ms),
        TaskEvent::Reported { request, .. } if task.reported_by.as_ref() == Some(request) => {}
        TaskEvent::Reported { request, steps, note, session } => {
            reported(task, *steps, note.as_ref(), session.as_ref(), now_ms)?;
            task.reported_by = Some(request.clone());
        }
        TaskEvent::Asked { request, effect, gated } => return asked(task, request, effect, *gated, now_ms),
        TaskEvent::EffectEnded { request, failed } => return effect_ended(task, request, failed.as_ref(), now_ms),
        TaskEvent::StepEnded { step, ended } => step_ended(task, *step, ended, now_ms),
        TaskEvent::Stop { by } if task.stop.is_none() => stop(task, by, now_ms),
        TaskEvent::LimitPassed { cause, message } => {
            let outcome = match cause {
                TaskCause::Inactivity => TaskState::Inactive,
                TaskCause::Reports => TaskState::StepLimit,
                _ => TaskState::TimedOut,
            };
            end_as(task, outcome, *cause, Some(message.clone()), now_ms);
        }
        TaskEvent::NotPrepared { what } if matches!(task.state, TaskState::Queued | TaskState::Preparing) => {
            end_as(task, TaskState::Failed, TaskCause::NotPrepared, Some(what.clone()), now_ms);
        }
        TaskEvent::Gone { what } => {
            end_as(task, TaskState::Lost, TaskCause::SandboxLost, Some(what.clone()), now_ms);
        }
        TaskEvent::Cut if task.ending.is_some() && task.times.cut_at_ms.is_none() => {
            task.times.cut_at_ms = Some(now_ms);
        }
        TaskEvent::Killed { ended } if task.ending.is_some() && task.times.killed_at_ms.is_none() => {
            for known in task.executions.iter_mut().filter(|known| known.ended.is_none()) {
                known.ended = ended.iter().find(|(id, _)| *id == known.id).map(|(_, state)| state.clone());
            }
            forsake(task, now_ms);
            task.times.killed_at_ms = Some(now_ms);
        }
        TaskEvent::Confirmed => confirmed(task, now_ms),
        TaskEvent::Continued { .. } | TaskEvent::Marked { .. } => return Err(TaskDenial::NotOver),
        // What came too late, or twice.
        TaskEvent::TakenUp
        | TaskEvent::Moved { .. }
        | TaskEvent::Entered { .. }
        | TaskEvent::Starting { .. }
        | TaskEvent::Prepared
        | TaskEvent::Output
        | TaskEvent::Stop { .. }
        | TaskEvent::NotPrepared { .. }
        | TaskEvent::Cut
        | TaskEvent::Killed { .. } => {}
    }
    Ok(())
}

fn is_preparing(task: &Task) -> bool {
    task.state == TaskState::Preparing && task.ending.is_none()
}

/// The first end that is wanted is the one that it gets.
fn end_as(task: &mut Task, outcome: TaskState, cause: TaskCause, message: Option<String>, now_ms: u64) {
    if task.ending.is_none() {
        task.ending = Some(Ending { outcome, cause, message, at_ms: now_ms });
    }
}

fn stop(task: &mut Task, by: &Actor, now_ms: u64) {
    let effect_in_flight = task.in_flight().map(|grant| grant.effect.clone());
    task.stop = Some(StopAsked { by: by.clone(), at_ms: now_ms, effect_in_flight });
    end_as(task, TaskState::Stopped, TaskCause::UserStop, None, now_ms);
}

fn starting(task: &mut Task, step: Option<u32>) {
    let fits = match step {
        None => task.state == TaskState::Preparing,
        Some(step) => task.state == TaskState::Running && step == task.step,
    };
    let Some(generation) = task.generation.filter(|_| fits) else { return };
    let id = task.execution_of(step);
    if task.executions.iter().all(|known| known.id != id) {
        task.executions.push(TaskExecution { id, step, generation, started_at_ms: None, ended: None });
    }
}

fn started(task: &mut Task, execution: &ExecutionId, now_ms: u64) {
    let Some(known) = task.executions.iter_mut().find(|known| known.id == *execution) else { return };
    known.started_at_ms.get_or_insert(now_ms);
    if known.step.is_some() {
        task.times.started_at_ms.get_or_insert(now_ms);
    }
}

fn end_execution(task: &mut Task, step: Option<u32>, ended: &ExecState) {
    if let Some(known) = task.executions.iter_mut().find(|known| known.step == step)
        && known.ended.is_none()
    {
        known.ended = Some(ended.clone());
    }
}

fn reported(
    task: &mut Task,
    steps: u64,
    note: Option<&String>,
    session: Option<&String>,
    now_ms: u64,
) -> Result<(), TaskDenial> {
    if !matches!(task.state, TaskState::Running | TaskState::Committing) {
        return Err(TaskDenial::NotRunning);
    }
    if task.ending.is_some() {
        return Err(TaskDenial::Ending);
    }
    task.reported = task.reported.saturating_add(steps);
    task.times.reported_at_ms = Some(now_ms);
    if let Some(note) = note {
        task.note = Some(note.clone());
    }
    if let Some(session) = session {
        task.session = Some(session.clone());
    }
    if let Some(max) = task.limits.reports_max.filter(|max| task.reported > *max) {
        let message = format!("{} steps were reported, and {max} are allowed", task.reported);
        end_as(task, TaskState::StepLimit, TaskCause::Reports, Some(message), now_ms);
    }
    Ok(())
}

/// Where stop, limits and effects are put into an order: what is to end is granted nothing.
fn asked(task: &mut Task, request: &RequestId, effect: &str, gated: bool, now_ms: u64) -> Result<(), TaskDenial> {
    if let Some(granted) = task.grants.iter_mut().find(|grant| grant.request == *request) {
        // Who asks again was not answered, so it has not begun.
        let must_not = task.ending.is_some() && gated;
        if must_not && granted.outcome == EffectOutcome::InFlight {
            granted.outcome = EffectOutcome::Failed { what: "it was never begun".to_owned() };
            granted.ended_at_ms = Some(now_ms);
            back_to_running(task);
            return Ok(());
        }
        return if must_not { Err(TaskDenial::Ending) } else { Ok(()) };
    }
    if gated {
        if task.ending.is_some() && !is_planted(Planted::GrantAfterStop) {
            return Err(TaskDenial::Ending);
        }
        match task.state {
            TaskState::Running => {}
            TaskState::Committing => return Err(TaskDenial::Busy),
            _ => return Err(TaskDenial::NotRunning),
        }
        let rule = task.effects.iter().find(|rule| rule.name == effect).ok_or(TaskDenial::Undeclared)?;
        for before in task.grants.iter().filter(|grant| grant.effect == effect) {
            match before.outcome {
                EffectOutcome::Done if is_planted(Planted::EffectTwice) => {}
                EffectOutcome::Done if !rule.repeatable => return Err(TaskDenial::DoneBefore),
                EffectOutcome::Unknown => return Err(TaskDenial::Unknown),
                EffectOutcome::Done | EffectOutcome::Failed { .. } | EffectOutcome::InFlight => {}
            }
        }
        if task.grants.len() >= GRANTS_MAX {
            return Err(TaskDenial::TooMany);
        }
    }
    task.grants.push(Grant {
        request: request.clone(),
        effect: effect.to_owned(),
        run: task.run,
        at_ms: now_ms,
        ended_at_ms: None,
        outcome: EffectOutcome::InFlight,
    });
    if task.state == TaskState::Running {
        task.state = TaskState::Committing;
    }
    Ok(())
}

fn back_to_running(task: &mut Task) {
    if task.state == TaskState::Committing && task.in_flight().is_none() {
        task.state = TaskState::Running;
    }
}

fn effect_ended(task: &mut Task, request: &RequestId, failed: Option<&String>, now_ms: u64) -> Result<(), TaskDenial> {
    let grant = task.grants.iter_mut().find(|grant| grant.request == *request).ok_or(TaskDenial::NoGrant)?;
    // Once it was given up as unknown it stays so: somebody may have been told.
    if grant.outcome == EffectOutcome::InFlight {
        grant.outcome = match failed {
            None => EffectOutcome::Done,
            Some(what) => EffectOutcome::Failed { what: what.clone() },
        };
        grant.ended_at_ms = Some(now_ms);
        back_to_running(task);
    }
    Ok(())
}

/// Its tree is gone: of what was in flight nobody will hear any more.
fn forsake(task: &mut Task, now_ms: u64) {
    for grant in task.grants.iter_mut().filter(|grant| grant.outcome == EffectOutcome::InFlight) {
        grant.outcome = EffectOutcome::Unknown;
        grant.ended_at_ms = Some(now_ms);
    }
    back_to_running(task);
}

fn step_ended(task: &mut Task, step: u32, ended: &ExecState, now_ms: u64) {
    let runs = matches!(task.state, TaskState::Running | TaskState::Committing);
    if !ended.is_final() || !runs {
        return;
    }
    end_execution(task, Some(step), ended);
    if step != task.step || task.ending.is_some() {
        return;
    }
    let failed = |task: &mut Task, cause, message| end_as(task, TaskState::Failed, cause, message, now_ms);
    match ended {
        ExecState::Running | ExecState::Suspended => {}
        ExecState::Exited { code: 0 } if (step as usize) + 1 < task.steps.len() => {
            // What it left in the background is ended before the next one, and an effect in there with it.
            forsake(task, now_ms);
            task.step += 1;
        }
        ExecState::Exited { code: 0 } => end_as(task, TaskState::Succeeded, TaskCause::Done, None, now_ms),
        ExecState::Exited { code } => {
            failed(task, TaskCause::Exited, Some(format!("step {step} exited with {code}")));
        }
        ExecState::Signalled { signal } => {
            failed(task, TaskCause::Signalled, Some(format!("step {step} was ended by signal {signal}")));
        }
        ExecState::OomKilled => failed(task, TaskCause::OomKilled, Some(format!("step {step} used too much memory"))),
        ExecState::Failed { what } => failed(task, TaskCause::NotStarted, Some(what.clone())),
        ExecState::Cancelled => failed(task, TaskCause::Cancelled, Some(format!("step {step} was cancelled"))),
        ExecState::TimedOut => {
            let message = Some(format!("step {step} took longer than it may"));
            end_as(task, TaskState::TimedOut, TaskCause::StepTimeLimit, message, now_ms);
        }
        ExecState::Lost { cause } => {
            end_as(task, TaskState::Lost, TaskCause::SandboxLost, Some(cause.clone()), now_ms);
        }
    }
}

fn confirmed(task: &mut Task, now_ms: u64) {
    let Some(ending) = &task.ending else { return };
    let outcome = ending.outcome;
    forsake(task, now_ms);
    let unknown = |grant: &Grant| grant.run == task.run && grant.outcome == EffectOutcome::Unknown;
    task.state = if task.grants.iter().any(unknown) { TaskState::EffectUnknown } else { outcome };
    task.times.killed_at_ms.get_or_insert(now_ms);
    task.times.confirmed_at_ms = Some(now_ms);
    if !task.keep_alive {
        task.credentials.clear();
    }
}
