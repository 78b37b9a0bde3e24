// Package subjects is the wire: the only place that spells a subject, a stream
// or bucket name, a header or a message field.
//
// It holds names and their validation (names.go), headers (headers.go), the
// request and the result (request.go, result.go), the values kept in NATS KV
// (values.go), the pool's settings (pool.go), and the configuration of every
// stream and bucket with their idempotent creation (streams.go).
//
// It imports the types of nats.go and nothing else of NATS or of rollbus, so
// that every other package, and any program outside, can depend on it.
//
// Nothing here blocks but Ensure; nothing here keeps state.
package subjects
