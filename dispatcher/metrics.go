package dispatcher

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/rollbus/rollbus/dispatcher/core"
)

// metrics are all in a registry of their own. No label takes values that
// trainers or agents choose.
type metrics struct {
	registry *prometheus.Registry

	step, eventWait, dispatch                              prometheus.Histogram
	queued, inHand, inHandBytes, waiting, stray, jobs      prometheus.Gauge
	walking                                                prometheus.Gauge
	disconnects, walked, strays                            prometheus.Counter
	acks, pullErrors, consumers, malformed, dropped, looks *prometheus.CounterVec
	writes, repeats, restarts, renewals, snapshots         *prometheus.CounterVec
	walks, walkAnswers, decisions                          *prometheus.CounterVec

	core *coreCounts
}

const namespace = "rollbus_dispatcher"

func newMetrics() *metrics {
	m := &metrics{registry: prometheus.NewRegistry()}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help})
		m.registry.MustRegister(c)
		return c
	}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
		m.registry.MustRegister(c)
		return c
	}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help})
		m.registry.MustRegister(g)
		return g
	}
	histogram := func(name, help string, start, factor float64, n int) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(start, factor, n),
		})
		m.registry.MustRegister(h)
		return h
	}
	m.step = histogram("step_seconds", "Time of one step of the decision core.", 1e-6, 2, 18)
	m.eventWait = histogram("event_wait_seconds", "Time that an event waited for the decision core.", 1e-6, 4, 12)
	m.dispatch = histogram("dispatch_seconds", "From a request's acceptance in ROLLOUTS to its acknowledged bind, on the NATS server's clock.", 1e-3, 2, 20)
	m.queued = gauge("events_waiting", "Events that wait for the decision core.")
	m.inHand = gauge("in_hand_messages", "Messages fetched and neither acked nor given back.")
	m.inHandBytes = gauge("in_hand_bytes", "Bytes of the messages in hand.")
	m.waiting = gauge("queued_messages", "Messages in ROLLOUTS and RETRY at the last look, those in hand included.")
	m.stray = gauge("stray_messages", "Messages in ROLLOUTS and RETRY whose subject names no job and lane, at the last look: they are rejected soon.")
	m.jobs = gauge("queues", "Queues that hold messages: lanes of jobs and their retries.")
	m.walking = gauge("expiry_walker", "1 while this dispatcher walks the queues for deadlines and cancels.")
	m.disconnects = counter("disconnects_total", "Times that the connection to NATS was lost.")
	m.walked = counter("walked_messages_total", "Queued messages read by the expiry walker.")
	m.strays = counter("strays_total", "Submits whose subject names no job, kept in DEAD and rejected by this dispatcher.")
	m.acks = vec("acks_total", "Answers to consumers, by kind: ack, nak, and those that could not be sent.", "kind")
	m.pullErrors = vec("pull_errors_total", "Pulls that ended with an error, by kind.", "kind")
	m.consumers = vec("consumers_total", "What was done about consumers: ensured, refused, differs, stepdown, remade.", "what")
	m.malformed = vec("malformed_total", "What could not be read, by kind: submit, load, cache, snapshot, delivery, view_<view>.", "kind")
	m.dropped = vec("dropped_total", "What was dropped because the receiver was too slow: telemetry, decision.", "what")
	m.looks = vec("looks_total", "Looks at the queues, by result.", "result")
	m.writes = vec("writes_total", "Writes and leader reads, by kind and answer.", "write", "answer")
	m.repeats = vec("write_repeats_total", "Identical repetitions of writes whose outcome was unknown.", "write")
	m.restarts = vec("follower_restarts_total", "Followers begun anew, by view and cause.", "view", "cause")
	m.renewals = vec("renewals_total", "Renewals of the own registration, by result.", "result")
	m.snapshots = vec("snapshots_total", "Cache snapshots asked for, by result.", "result")
	m.walks = vec("walks_total", "Steps of the expiry walker, by result.", "result")
	m.walkAnswers = vec("walk_answers_total", "Queued requests answered by the expiry walker, by status.", "status")
	m.decisions = vec("decisions_total", "Decisions, by policy mode and reason.", "mode", "reason")
	m.zeroes()
	m.core = &coreCounts{registry: m.registry, by: map[string]*coreCount{}}
	for _, why := range [...]string{"returned", "epoch", "lost"} {
		m.core.zero("requeues", why)
	}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// zeroes shows at 0 what alerts are made of: a rate over a series that appears
// with its first event does not see that event.
func (m *metrics) zeroes() {
	for _, w := range [...]string{"bind", "requeue", "delete_key", "result", "bury"} {
		for _, a := range [...]core.Answer{core.OK, core.Full, core.Unavailable} {
			m.writes.WithLabelValues(w, string(a))
		}
	}
	for _, kind := range [...]string{"submit", "load", "cache", "snapshot", "delivery", "view_" + string(core.ViewEngines), "view_" + string(core.ViewReservations)} {
		m.malformed.WithLabelValues(kind)
	}
	for _, what := range [...]string{"telemetry", "decision"} {
		m.dropped.WithLabelValues(what)
	}
}

func (m *metrics) decided(e core.Decision) {
	// Modes and reasons are closed lists of package policy.
	m.decisions.WithLabelValues(e.Mode, e.Reason).Inc()
}

func (m *metrics) count(e core.Count) { m.core.add(e) }

// coreCounts are the Count effects: one family a name. Names and labels are the
// core's own words; the bounds hold should one ever carry a foreign text.
type coreCounts struct {
	registry *prometheus.Registry

	mu sync.Mutex
	by map[string]*coreCount
}

type coreCount struct {
	vec    *prometheus.CounterVec
	labels map[string]struct{}
}

const (
	maxCoreNames  = 128
	maxCoreLabels = 64 // of one name; further ones are counted as "other"
	maxLabelBytes = 48
)

// zero shows a count before there is one.
func (c *coreCounts) zero(name, label string) { c.count(core.Count{Name: name, Label: label}) }

func (c *coreCounts) add(e core.Count) {
	if e.N > 0 {
		c.count(e)
	}
}

func (c *coreCounts) count(e core.Count) {
	if !metricName(e.Name) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.by[e.Name]
	if x == nil {
		if len(c.by) >= maxCoreNames {
			return
		}
		x = &coreCount{labels: map[string]struct{}{}, vec: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "core_" + e.Name + "_total", Help: helpOf(e.Name),
		}, []string{"label"})}
		if c.registry.Register(x.vec) != nil {
			return
		}
		c.by[e.Name] = x
	}
	label := e.Label
	if _, known := x.labels[label]; !known {
		if len(x.labels) >= maxCoreLabels || len(label) > maxLabelBytes {
			label = "other"
		}
		x.labels[label] = struct{}{}
	}
	x.vec.WithLabelValues(label).Add(float64(e.N))
}

func metricName(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; !(c >= 'a' && c <= 'z' || c == '_' || i > 0 && c >= '0' && c <= '9') {
			return false
		}
	}
	return true
}

// coreHelp says what the core counts.
var coreHelp = map[string]string{
	"rebuilds":             "Times that the core asked for fresh views, by cause.",
	"settings_refused":     "Pool settings that were refused whole; those before stay in force.",
	"requeue_freezes":      "Times that many engines fell silent at once and requeueing was frozen.",
	"reservations_expired": "Reservations that the server reclaimed by their TTL, by state.",
	"requeues":             "Reservations requeued, by cause.",
	"bind_refusals":        "Binds that were refused, by answer.",
	"fetch_errors":         "Pulls that the core was told had failed.",
	"acks":                 "Messages that left their queue, by why: bound, live, answered, requeued, outranked, dead, or the status of the answer.",
	"loads_unused":         "Load reports that do not count, by what is wrong with them.",
	"cache_events":         "Cache events that nobody can use: ignored.",
	"cache_resyncs":        "Engines whose cache view was lost and is asked for anew, by cause.",
	"servers_refused":      "Servers of the settings that bear an engine's name.",
	"shadow":               "In mode shadow, decisions that the policy would have made too (agrees), and not (differs).",
	"owner_transitions":    "Changes of owners and seeds made by this dispatcher: first, seeded, proved, cooldown, given_back, over_ceiling, struck, refreshed.",
	"owner_proofs":         "Completions of keys without owner: clean, and why others prove nothing: stray, failed, no_usage, other_life, unprovable.",
	"owners_struck":        "Owners that count no more for what their cache events say: evicted, cleared.",
	"owner_waits":          "Requests that waited for the pressured owners of their key, by why no owner could be added.",
}

func helpOf(name string) string {
	if h, ok := coreHelp[name]; ok {
		return h
	}
	return "Counted by the decision core: " + name + "."
}
