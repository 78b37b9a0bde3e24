package workeragent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/rollbus/rollbus/subjects"
)

// metrics of one agent. Labels are engines of this agent and words of closed lists.
type metrics struct {
	a *Agent

	ended         *prometheus.CounterVec
	returns       *prometheus.CounterVec
	repeats       *prometheus.CounterVec
	tokens        *prometheus.CounterVec
	probes        *prometheus.CounterVec
	epochs        *prometheus.CounterVec
	loads         *prometheus.CounterVec
	loadProblems  *prometheus.CounterVec
	registrations *prometheus.CounterVec
	checkpoints   *prometheus.CounterVec
	cacheChanges  *prometheus.CounterVec
	cacheAlarms   *prometheus.CounterVec

	runs, state, slots          *prometheus.Desc
	spoolBytes, spoolCount      *prometheus.Desc
	contactAge, reportedWaiting *prometheus.Desc
}

func newMetrics(a *Agent) *metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "rollbus", Subsystem: "agent", Name: name, Help: help}, append([]string{"engine"}, labels...))
	}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("rollbus_agent_"+name, help, labels, nil)
	}
	return &metrics{
		a:             a,
		ended:         counter("runs_ended_total", "Runs by how they ended: a status of a result, returned, superseded or dropped.", "end"),
		returns:       counter("returns_total", "Reservations given back, by reason.", "reason"),
		repeats:       counter("repeats_total", "Repetitions of writes that were not answered.", "write"),
		tokens:        counter("tokens_total", "Tokens received from the engine, where it tells ids."),
		probes:        counter("probes_total", "Looks at the engine's capabilities.", "result"),
		epochs:        counter("restarts_total", "Restarts of the engine that were seen."),
		loads:         counter("loads_total", "Load snapshots published, by source.", "source"),
		loadProblems:  counter("load_problems_total", "Samples of the engine's load that do not count: frozen, inconsistent or incomplete.", "problem"),
		registrations: counter("registrations_total", "Registrations written."),
		checkpoints:   counter("checkpoints_total", "Checkpoints of partial output written."),

		cacheChanges: counter("cache_changes_total", "Cache changes published."),
		cacheAlarms:  counter("cache_alarms_total", "What smelled about an engine's cache events, by kind.", "kind"),

		runs:            desc("runs", "Reservations that are run or settled now.", "engine"),
		state:           desc("engine_state", "1 for the state that the registration says, 0 for the others.", "engine", "state"),
		slots:           desc("slots", "Requests that the engine runs at once.", "engine"),
		reportedWaiting: desc("engine_waiting", "Waiting requests that the engine reported last.", "engine"),
		spoolBytes:      desc("spool_bytes", "Finished answers that are not stored yet, bytes."),
		spoolCount:      desc("spool_answers", "Finished answers that are not stored yet."),
		contactAge:      desc("contact_age_seconds", "Time since NATS was heard of."),
	}
}

func (m *metrics) vectors() []*prometheus.CounterVec {
	return []*prometheus.CounterVec{m.ended, m.returns, m.repeats, m.tokens, m.probes, m.epochs, m.loads, m.loadProblems, m.registrations, m.checkpoints, m.cacheChanges, m.cacheAlarms}
}

func (m *metrics) descs() []*prometheus.Desc {
	return []*prometheus.Desc{m.runs, m.state, m.slots, m.reportedWaiting, m.spoolBytes, m.spoolCount, m.contactAge}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, v := range m.vectors() {
		v.Describe(ch)
	}
	for _, d := range m.descs() {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, v := range m.vectors() {
		v.Collect(ch)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, u := range m.a.units {
		state := string(u.state())
		u.mu.Lock()
		runs, slots, queued := len(u.runs), u.slotsLocked(), u.queued
		u.mu.Unlock()
		gauge(m.runs, float64(runs), u.name)
		gauge(m.slots, float64(slots), u.name)
		gauge(m.reportedWaiting, float64(queued), u.name)
		for _, s := range [...]subjects.EngineState{subjects.EngineReady, subjects.EngineStarting, subjects.EnginePaused, subjects.EngineDraining, subjects.EngineStale, subjects.EngineDown} {
			gauge(m.state, map[bool]float64{true: 1}[string(s) == state], u.name, string(s))
		}
	}
	count, bytes := m.a.spool.figures()
	gauge(m.spoolCount, float64(count))
	gauge(m.spoolBytes, float64(bytes))
	if age := m.a.contactAge(); age < 1<<62 {
		gauge(m.contactAge, age.Seconds())
	}
}
