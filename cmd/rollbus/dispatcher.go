package main

import (
	"time"

	"github.com/rollbus/rollbus/dispatcher"
)

// Dispatcher is the daemon that places rollouts.
type Dispatcher struct {
	Name    string `help:"Name in the pool; without one it is the host's and a random token." placeholder:"NAME"`
	Explain bool   `help:"Publish decisions with their candidates: up to 16, with features and score parts, some KB each."`
	layoutFlags
	httpFlag
	scaleFlag
	journalFlag
}

// Help shows examples.
func (Dispatcher) Help() string {
	return `Examples:
  rollbus dispatcher --pool math --http :9470
  ROLLBUS_SERVER=nats://n1,nats://n2,nats://n3 rollbus dispatcher --replicas 3
Any number may serve a pool. SIGTERM gives back what is in hand within 5 s; a second one ends at once.`
}

// dispatcherBudget is a little more than a dispatcher's own soft stop.
const dispatcherBudget = 8 * time.Second

// Run serves until told to stop.
func (c *Dispatcher) Run(a *app) error {
	if err := c.check(); err != nil {
		return err
	}
	settings := recommended()
	log := a.log()
	nc, err := a.connectDaemon("rollbus dispatcher")
	if err != nil {
		return err
	}
	defer nc.Close()
	if err := a.reached(nc); err != nil {
		return err
	}
	cfg := dispatcher.Config{
		Pool: a.opts.Pool, Name: c.Name, Version: programVersion(), Layout: c.layout(settings.Record), Log: log,
		Timings: dispatcher.DefaultTimings().Scale(c.TimingScale), Explain: c.Explain,
	}.WithDefaults()
	if c.Journal {
		done, err := c.record(a, &cfg, nc, log)
		if err != nil {
			return err
		}
		defer done()
	}
	d, err := dispatcher.New(cfg, nc)
	if err != nil {
		return coded(exitUsage, "%w", err)
	}
	var parts []part
	if c.HTTP != "" {
		h, addr, err := httpPart(c.HTTP, d.Handler())
		if err != nil {
			return err
		}
		log.Info("serving metrics and health", "http", addr)
		parts = append(parts, h)
	}
	log.Info("dispatcher starting", "dispatcher", d.Name(), "pool", a.opts.Pool, "version", programVersion())
	return supervise(a.ctx, log, dispatcherBudget, append(parts, part{name: "dispatcher", run: d.Run, stop: d.Stop})...)
}
