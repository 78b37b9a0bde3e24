package journal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// SelfCheck bounds the replay of a dispatcher's own journal in the background.
// Zero fields take the default.
type SelfCheck struct {
	Every  time.Duration // 10m between the beginnings of two samples
	Span   time.Duration // 30s of the core's time are a sample
	Bytes  int           // 8 MiB of stored frames are one at most; larger states are not checked
	Share  float64       // 0.01 of one CPU
	chunks int           // steps between two looks at the clock; 64
}

func (o SelfCheck) withDefaults() SelfCheck {
	if o.Every <= 0 {
		o.Every = 10 * time.Minute
	}
	if o.Span <= 0 {
		o.Span = 30 * time.Second
	}
	if o.Bytes <= 0 {
		o.Bytes = 8 << 20
	}
	if o.Share <= 0 || o.Share > 1 {
		o.Share = 0.01
	}
	o.chunks = 64
	return o
}

// checker collects a sample of the frames that were stored, from the beginning
// or a checkpoint on, and re-runs it. It holds one sample at a time.
//
//	idle --begin or checkpoint, Every is over--> collecting --Span--> running --> idle
//	                                                 '--Bytes--> idle, counted
type checker struct {
	opt   SelfCheck
	meter *meter
	log   *slog.Logger

	// The publishing goroutine's.
	frames [][]byte
	bytes  int
	now    time.Duration // of the sample's beginning
	began  time.Time     // of the last sample

	mu   sync.Mutex
	free bool // the last sample is done
	work chan [][]byte
	done chan struct{}
}

func newChecker(ctx context.Context, o SelfCheck, m *meter, log *slog.Logger) *checker {
	k := &checker{opt: o.withDefaults(), meter: m, log: log, free: true, work: make(chan [][]byte, 1), done: make(chan struct{})}
	go k.run(ctx)
	return k
}

// keep sees every frame that was stored, in order.
func (k *checker) keep(h *Header, frame []byte) {
	switch {
	case k.frames != nil:
	case h.Begin == nil || h.Part > 0 || k.isRunning() || !k.began.IsZero() && time.Since(k.began) < k.opt.Every:
		return
	default:
		k.began, k.now, k.bytes = time.Now(), time.Duration(h.Now), 0
	}
	k.frames = append(k.frames, frame)
	if k.bytes += len(frame); k.bytes > k.opt.Bytes {
		k.frames = nil
		k.meter.checkSkipped.Inc()
		return
	}
	if time.Duration(h.Now)-k.now < k.opt.Span && !h.End {
		return
	}
	k.setRunning(true)
	k.work <- k.frames // it is free: the last one was done
	k.frames = nil
}

func (k *checker) isRunning() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return !k.free
}

func (k *checker) setRunning(v bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.free = !v
}

func (k *checker) run(ctx context.Context) {
	defer close(k.done)
	for {
		select {
		case <-ctx.Done():
			return
		case frames := <-k.work:
			k.check(ctx, frames)
			k.setRunning(false)
		}
	}
}

func (k *checker) check(ctx context.Context, frames [][]byte) {
	p := &throttle{ctx: ctx, share: k.opt.Share, every: k.opt.chunks, busy: time.Now()}
	defer func() { k.meter.checkSeconds.Add(p.spent.Seconds()) }()
	journals, problems := Split(Slice(frames))
	if len(journals) != 1 || len(problems) > 0 {
		k.failed(errors.Join(append(problems, fmt.Errorf("%d journals in it", len(journals)))...))
		return
	}
	rep, err := Replay(journals[0], ReplayOptions{Pause: p.pause, From: 1})
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		k.failed(err)
		return
	case rep.Incomplete != "":
		k.failed(errors.New(rep.Incomplete))
	}
	k.meter.checkRuns.Inc()
	k.meter.checkEvents.Add(float64(rep.Events))
	k.meter.checkDecisions.Add(float64(rep.Decisions))
	if d := rep.First; d != nil {
		k.meter.checkDifferences.Inc()
		k.log.Error("replaying the own journal differs: decisions depend on something that is not recorded; report it with rollbus record",
			"event", d.Event, "type", d.Type, "what", d.What)
	}
}

func (k *checker) failed(err error) {
	k.meter.checkSkipped.Inc()
	k.log.Warn("a sample of the own journal cannot be checked", "err", err)
}

// throttle keeps its caller at a share of one CPU.
type throttle struct {
	ctx   context.Context
	share float64
	every int
	n     int
	busy  time.Time // since the last sleep
	spent time.Duration
}

func (p *throttle) pause() error {
	if p.n++; p.n%p.every != 0 {
		return nil
	}
	worked := time.Since(p.busy)
	p.spent += worked
	sleep := time.NewTimer(time.Duration(float64(worked) * (1/p.share - 1)))
	defer sleep.Stop()
	select {
	case <-p.ctx.Done():
		return context.Cause(p.ctx)
	case <-sleep.C:
		p.busy = time.Now()
		return nil
	}
}
