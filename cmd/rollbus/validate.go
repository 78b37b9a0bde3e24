package main

// Validate checks requests without sending them.
type Validate struct {
	File string `arg:"" help:"JSON Lines, one request each; - is standard input."`
	Job  string `short:"j" help:"Job of requests that name none." placeholder:"NAME"`
}

// Help shows examples.
func (Validate) Help() string {
	return `Examples:
  rollbus validate rollouts.jsonl
  generate | rollbus validate --job math -
Needs no NATS. Each problem is a line: file:line: field: what is wrong. Exit 2 when there is one.`
}

// Run checks them.
func (c *Validate) Run(a *app) error {
	n, err := (&Submit{File: c.File, Job: c.Job}).checkFile(a)
	if err != nil {
		return err
	}
	v := struct {
		Rollouts int `json:"rollouts"`
	}{n}
	return a.printer().one(v, func() error {
		a.say("%s: %d rollouts, all as they should be", c.File, n)
		return nil
	})
}
