// Package telemetry reads what engines say of their load: Prometheus text of
// vLLM, SGLang and llama.cpp, SGLang's JSON (/v1/loads, /get_load,
// /server_info) and its LoadStat and LoadSnapshot messages, llama.cpp's slots.
//
// Parsers are pure: bytes in, a Sample out. One rule stands above all others:
// what is missing is unknown, never zero. A number that is negative, absurd,
// doubled or at odds with its neighbours becomes unknown too and is named in
// Sample.Problems; nothing is clamped. A Sample is complete when every
// advertised data-parallel rank has reported and none of them has a problem;
// an incomplete one gives its engine no headroom (design S4).
//
// Tracker puts samples of one engine in order of time: rates from counters,
// restarts (a counter fell), gauges that froze, wedged schedulers, freshness;
// its output is the wire's subjects.Load. Poller decides when to ask. Backlog is
// the other side: what no engine says and its agent sees of its own runs.
//
// Nothing here blocks but Poller.Run, and nothing retries: a failed reading is
// simply older at the next look.
package telemetry
