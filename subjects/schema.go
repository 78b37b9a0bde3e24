package subjects

import (
	_ "embed"
	"slices"
)

//go:embed schema/rollout.json
var schema []byte

// Schema is the JSON Schema (2020-12) of the messages: $defs/Request and
// $defs/Result with what they hold. It is generated from the types and their
// comments; a test keeps it in step.
func Schema() []byte { return slices.Clone(schema) }
