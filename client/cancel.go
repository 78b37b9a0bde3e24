package client

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/rollbus/rollbus/kvstate"
	"github.com/rollbus/rollbus/subjects"
)

// Target says which rollouts of the client's job are given up.
type Target struct{ kind, value string }

// ByID is one rollout.
func ByID(id string) Target { return Target{subjects.CancelID, id} }

// ByGroup is every sample of a group.
func ByGroup(id string) Target { return Target{subjects.CancelGroup, id} }

// ByTrajectory is every turn of a trajectory.
func ByTrajectory(id string) Target { return Target{subjects.CancelTrajectory, id} }

// WholeJob is everything of the job.
func WholeJob() Target { return Target{kind: subjects.CancelJob} }

// OlderThan is every run whose weights are older than a version.
func OlderThan(version int64) Target {
	return Target{subjects.CancelVersion, strconv.FormatInt(version, 10)}
}

// Cancel asks that rollouts are given up, wherever they are; it returns when the
// wish is stored. Each of them is still answered: cancelled, or whatever was
// faster. Reason is for people, up to 512 bytes.
func (c *Client) Cancel(ctx context.Context, what Target, reason string) error {
	if err := c.closed(); err != nil {
		return err
	}
	switch {
	case what.kind == "":
		return fmt.Errorf("%w: cancel nothing: give ByID, ByGroup, ByTrajectory, WholeJob or OlderThan", ErrBadOption)
	case what.value == "" && what.kind != subjects.CancelJob:
		return fmt.Errorf("%w: cancel by %s: the value is empty", ErrBadOption, what.kind)
	case len(reason) > subjects.MaxString:
		return fmt.Errorf("%w: cancel: the reason is %d bytes long: at most %d", ErrBadOption, len(reason), subjects.MaxString)
	}
	if what.kind == subjects.CancelID {
		if err := subjects.CheckToken("id", what.value); err != nil {
			return fmt.Errorf("cancel: %w", err)
		}
	}
	v := subjects.Cancel{
		SchemaVersion: subjects.SchemaVersion, Kind: what.kind, Job: c.job, Value: what.value,
		Reason: reason, At: time.Now().UnixMilli(),
	}
	pause := 50 * time.Millisecond
	for {
		err := c.store.PutCancel(ctx, v)
		switch {
		case err == nil, errors.Is(err, kvstate.ErrDuplicate):
			return nil
		case errors.Is(err, kvstate.ErrFull):
			return fmt.Errorf("cancel: %w", &BackpressureError{RetryAfter: c.full.next(), Cause: err.Error()})
		case !errors.Is(err, kvstate.ErrUnknown) && !errors.Is(err, kvstate.ErrUnavailable) && !errors.Is(err, kvstate.ErrBusy):
			return err
		}
		// Writing the same wish again is harmless.
		if wait := c.sleep(ctx, jitter(pause)); wait != nil {
			return fmt.Errorf("%w: cancel by %s: %w", ErrUnknown, what.kind, errors.Join(wait, err))
		}
		pause = min(2*pause, 2*time.Second)
	}
}
