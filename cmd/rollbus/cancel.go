package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/rollbus/rollbus/subjects"
)

// Cancel gives up rollouts.
type Cancel struct {
	IDs []string `arg:"" optional:"" name:"id" help:"Rollouts of the job."`

	Job        string `short:"j" required:"" help:"Job." placeholder:"NAME"`
	Group      string `help:"A whole group." placeholder:"ID"`
	Trajectory string `help:"A whole trajectory." placeholder:"ID"`
	All        bool   `help:"The whole job: what is queued and what runs."`
	Reason     string `default:"cancelled from the command line" help:"Reason that the answers carry." placeholder:"TEXT"`
}

// Help shows examples.
func (Cancel) Help() string {
	return `Examples:
  rollbus cancel --job math 0001 0002
  rollbus cancel --job math --group g7
  rollbus cancel --job math --all
Every cancelled rollout still gets its one answer, with status cancelled.`
}

// Run asks for it.
func (c Cancel) Run(a *app) error {
	ask := subjects.Cancel{SchemaVersion: subjects.SchemaVersion, Job: c.Job, Reason: c.Reason, At: time.Now().UnixMilli()}
	var all []subjects.Cancel
	add := func(kind, value string) {
		ask.Kind, ask.Value = kind, value
		all = append(all, ask)
	}
	for _, id := range c.IDs {
		add(subjects.CancelID, id)
	}
	if c.Group != "" {
		add(subjects.CancelGroup, c.Group)
	}
	if c.Trajectory != "" {
		add(subjects.CancelTrajectory, c.Trajectory)
	}
	if c.All {
		add(subjects.CancelJob, "")
	}
	if len(all) == 0 {
		return coded(exitUsage, "cancel: name ids, --group, --trajectory or --all")
	}
	var errs []error
	for _, one := range all {
		errs = append(errs, subjects.CheckToken("job", one.Job))
		if one.Kind != subjects.CancelJob {
			errs = append(errs, subjects.CheckToken(one.Kind, one.Value))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return a.looking(func(l *look) error {
		for _, one := range all {
			if err := l.s.PutCancel(l.ctx, one); err != nil {
				return fmt.Errorf("cancel %s: %w", one.Key(), err)
			}
			a.say("cancelling %s", one.Key())
		}
		return nil
	})
}
