// Package subjects is the wire: the only place that spells a subject, a stream
// or bucket name, a header or a message field.
//
// It holds names and their validation (names.go), headers and what they say
// (headers.go, facts.go, codec.go), the request and the result with their
// decoding and validation (request.go, result.go, decode.go, validate.go), the
// values kept in NATS KV (values.go), the pool's settings (settings.go), and
// the configuration of every stream, bucket and consumer with their idempotent
// creation (layout.go, streams.go). schema/ is the contract for other languages.
//
// It imports the types of nats.go and nothing else of NATS or of rollbus, so
// that every other package, and any program outside, can depend on it.
//
// Nothing here blocks but Ensure; nothing here keeps state.
package subjects
