package journal

import "github.com/prometheus/client_golang/prometheus"

// meter counts what a Writer does. The Writer is its collector.
type meter struct {
	events, bytes, lostEvents, lostBatches, refused prometheus.Counter
	checkpoints, checkpointSeconds, skipped         prometheus.Counter
	checkRuns, checkEvents, checkDecisions          prometheus.Counter
	checkDifferences, checkSkipped, checkSeconds    prometheus.Counter
	all                                             []prometheus.Collector
}

func newMeter(w *Writer) *meter {
	m := &meter{}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Namespace: "rollbus_dispatcher", Subsystem: "journal", Name: name, Help: help})
		m.all = append(m.all, c)
		return c
	}
	m.events = counter("events_total", "Steps of the core recorded for the journal, dropped ones included.")
	m.bytes = counter("bytes_total", "Bytes of the journal stored, compressed.")
	m.lostEvents = counter("lost_events_total", "Recorded steps that were dropped: the journal has gaps.")
	m.lostBatches = counter("lost_batches_total", "Batches of the journal that were dropped.")
	m.refused = counter("refused_total", "Frames of the journal that were not stored at the first try.")
	m.checkpoints = counter("checkpoints_total", "Checkpoints of the core's state written: a replay may start at each.")
	m.checkpointSeconds = counter("checkpoint_seconds_total", "Time for which the core waited while checkpoints were taken.")
	m.skipped = counter("checkpoints_skipped_total", "Checkpoints that were not written: the state is too large, or the queue full.")
	if w.opt.SelfCheck != nil {
		m.checkRuns = counter("selfcheck_runs_total", "Samples of the own journal that were replayed and compared.")
		m.checkEvents = counter("selfcheck_events_total", "Steps of the core compared in them.")
		m.checkDecisions = counter("selfcheck_decisions_total", "Decisions compared in them.")
		m.checkDifferences = counter("selfcheck_differences_total", "Samples that came out otherwise: decisions depend on something that is not recorded.")
		m.checkSkipped = counter("selfcheck_skipped_total", "Samples that were too large, or could not be read.")
		m.checkSeconds = counter("selfcheck_seconds_total", "Time that replaying samples took, sleeps apart.")
	}
	m.all = append(m.all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: "rollbus_dispatcher", Subsystem: "journal", Name: "queued_bytes",
		Help: "Bytes of recorded steps that wait to be compressed and stored.",
	}, func() float64 { return float64(w.queued.Load()) }))
	return m
}

// Describe implements prometheus.Collector.
func (w *Writer) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range w.meter.all {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (w *Writer) Collect(ch chan<- prometheus.Metric) {
	for _, c := range w.meter.all {
		c.Collect(ch)
	}
}
