package core

import "github.com/rollbus/rollbus/dispatcher/policy"

// Candidates are what the next decision would read.
func (c *Core) Candidates() []policy.Candidate { return c.cands }

// KeptTypes are the types whose fields are the core's state, with the names of
// the fields that a Checkpoint holds and of those that follow from them.
var KeptTypes = []struct {
	Of            any
	Held, Derived string
}{
	{Core{},
		"now stepped server contact proof ready stopped settings revision engines others live cancels held answered retired lengths sticky index tags picks frozen freezeFor swept dirty atOnce jobs hand byKey queues idle ownerBook",
		"cfg t out policy decider names cands hits marked rec stages order lagging"},
	{engine{}, "name tag askAt reg revision known gone external renewed health past seq held sum binding assigned awaited picked view decode prefill", "at"},
	{held{}, "ReservationPut counted ended unseen cause since acting next", ""},
	{item{}, "h queue facts seq stored lane at stage ttl bind tokens engine expected busy reason policy predict holdUntil waitSeq waitUntil askAt held result seed sown seedAt kept", "owner anchor keyedBy"},
	{ownerBook{}, "keys attended seen mapSeen keysSwept kept", "seeded targets flying ownedBy anchors swapping keeping"},
	{ownerKey{}, "name entry marker seed flight awaitSeq awaitUntil struck first refresh acting actingAt writing writingWhy givingBack ending endingWhy since waiting next", "held"},
	{seedEntry{}, "SeedPut gone unseen retired proof why absent missing", ""},
	{strike{}, "engine epoch", ""},
	{job{}, "name reserved count used waiting", "waits"},
	{queue{}, "Queue backlog seen pulling next misfits", ""},
	{loadView{}, "load until usable why newer fuser kvBlocked preempted preemptSum counted", "fused"},
	{serverClock{}, "sample at floor", ""},
	{contactClock{}, "total last", "gap"},
	{answeredSet{}, "ring next horizon", "most has"},
	{entry{}, "hash stored", ""},
	{retiredLog{}, "byKey order", "most"},
	{retiredEntry{}, "bind requeued at", ""},
	{retiredAt{}, "key at", ""},
}

// NamesOfStages are those that stand in checkpoints.
func NamesOfStages() []string { return itemStageNames[:] }
