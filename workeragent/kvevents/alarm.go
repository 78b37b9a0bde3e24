package kvevents

// AlarmKind names what smells about an engine's events.
type AlarmKind string

// The kinds.
const (
	AlarmTokens      AlarmKind = "tokens_mismatch"        // block size x blocks != tokens
	AlarmBlockSize   AlarmKind = "block_size_mismatch"    // advertised and seen sizes differ
	AlarmFull        AlarmKind = "index_full"             // more blocks than may be followed
	AlarmLoRA        AlarmKind = "lora_unnamed"           // a LoRA with a number but no name
	AlarmAmbiguous   AlarmKind = "hash_ambiguous"         // one hash behind two parents
	AlarmRank        AlarmKind = "rank_mismatch"          // the batch's rank is not the socket's: another engine's port
	AlarmTopic       AlarmKind = "topic_mismatch"         // messages under another topic
	AlarmPublishers  AlarmKind = "two_publishers"         // a second publisher on a bound port
	AlarmUndecodable AlarmKind = "nothing_decodes"        // many batches, no event
	AlarmBroken      AlarmKind = "broken_event"           // an event of a known type does not decode
	AlarmDegraded    AlarmKind = "degraded"               // the cache view of a rank is not believed
	AlarmMute        AlarmKind = "mute"                   // nobody publishes at an advertised port
	AlarmOrphans     AlarmKind = "unknown_parents"        // stores whose parent never came
	AlarmNoMatch     AlarmKind = "no_lookup_matches"      // stores arrive, no prompt ever matches
	AlarmFalseHits   AlarmKind = "predicted_never_cached" // matches that the engine never confirms
)

// Alarm is one of them, for people. Repeats are counted, not repeated.
type Alarm struct {
	Kind  AlarmKind
	Rank  int
	Text  string
	Count int64 // how often so far
}
