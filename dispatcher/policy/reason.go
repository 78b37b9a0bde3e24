package policy

// The closed lists of a decision record: nothing else is ever written there.
// TestEveryReasonFilterBasisAndOutcomeIsReachable shows how each comes about.

// Reason says why a decision went as it did.
type Reason string

// Reasons of a placement.
const (
	ReasonLeastRequests  Reason = "least_requests"       // least reserved requests
	ReasonLeastTokens    Reason = "least_tokens"         // kv_tokens: least load in tokens over capacity
	ReasonNoCapacity     Reason = "capacity_unknown"     // kv_tokens: some candidate's capacity is unknown, requests decided
	ReasonPrefixMatch    Reason = "prefix_match"         // load_snapshot: least loaded of those that hold the prefix
	ReasonImbalance      Reason = "imbalance"            // load_snapshot: holders exist, all of them loaded too far above the least
	ReasonLeastLoad      Reason = "least_load"           // load_snapshot: nobody holds enough of the prefix
	ReasonBestScore      Reason = "best_score"           // weighted_cache
	ReasonLeastTime      Reason = "least_time"           // projected_time: the least loaded is also the soonest
	ReasonPrefixCredit   Reason = "prefix_credit"        // projected_time: a cached prefix outweighed load
	ReasonNoTelemetry    Reason = "telemetry_incomplete" // projected_time: reservations alone decided, without prefix credit
	ReasonHardEscape     Reason = "hard_escape"          // projected_time: the winner's load was out of proportion
	ReasonSticky         Reason = "sticky_trajectory"    // the trajectory's last engine, within the margin
	ReasonGroup          Reason = "sticky_group"         // the group's last engine, within its slots
	ReasonPolicyError    Reason = "policy_error"         // the policy failed, the baseline decided
	ReasonNoneEligible   Reason = "none_eligible"        // no engine may serve it
	ReasonNoneAdmissible Reason = "none_admissible"      // engines may serve it, none can take it now
	ReasonTooLarge       Reason = "too_large"            // larger than every engine
	ReasonWait           Reason = "wait_for_prefix"      // projected_time: waiting for the holder beats recomputing

	ReasonOwnerHold        Reason = "cached_owner_hold"    // owner_pressure: an owner under the watermark keeps its work
	ReasonSpill            Reason = "owner_pressure_spill" // owner_pressure: every owner is pressured, a seed adds a clean peer
	ReasonNoSafeSpill      Reason = "no_safe_spill_hold"   // owner_pressure: every owner is pressured and none may be added: the least pressured one, or wait
	ReasonFirstOwner       Reason = "first_owner"          // owner_pressure: nobody has the prefix or is on it: this one begins
	ReasonProvisional      Reason = "provisional_hold"     // owner_pressure: no owner yet, the oldest reservation of the key is here
	ReasonStray            Reason = "provisional_stray"    // owner_pressure: no owner yet, the provisional one is pressured
	ReasonOwnerUnavailable Reason = "owner_unavailable"    // owner_pressure: no owner may serve it now; this one does not become one
	ReasonLeastPressure    Reason = "least_pressure"       // owner_pressure: a request without an owner key
)

// Reasons is the whole list.
func Reasons() []Reason {
	return []Reason{
		ReasonLeastRequests, ReasonLeastTokens, ReasonNoCapacity, ReasonPrefixMatch, ReasonImbalance,
		ReasonLeastLoad, ReasonBestScore, ReasonLeastTime, ReasonPrefixCredit, ReasonNoTelemetry,
		ReasonHardEscape, ReasonSticky, ReasonGroup, ReasonPolicyError, ReasonNoneEligible,
		ReasonNoneAdmissible, ReasonTooLarge, ReasonWait,
		ReasonOwnerHold, ReasonSpill, ReasonNoSafeSpill, ReasonFirstOwner, ReasonProvisional, ReasonStray,
		ReasonOwnerUnavailable, ReasonLeastPressure,
	}
}

// Basis says which picture of load decided, for all candidates of the decision.
type Basis string

// Bases.
const (
	BasisNone     Basis = "none"     // nothing was compared
	BasisReserved Basis = "reserved" // reservations alone
	BasisEngine   Basis = "engine"   // every eligible engine's own fresh report, and reservations newer than it
)

// Bases is the whole list.
func Bases() []Basis { return []Basis{BasisNone, BasisReserved, BasisEngine} }

// Outcome of a decision.
type Outcome string

// Outcomes.
const (
	OutcomePlaced         Outcome = "placed"
	OutcomeNoneEligible   Outcome = "none_eligible"   // give it back: only a change of engines helps
	OutcomeNoneAdmissible Outcome = "none_admissible" // keep it: the next retirement may help
	OutcomeTooLarge       Outcome = "too_large"       // answer it: nothing will ever help
	OutcomeWait           Outcome = "wait"            // keep it for Record.WaitFor, at most Record.WaitSpan
)

// Outcomes is the whole list.
func Outcomes() []Outcome {
	return []Outcome{OutcomePlaced, OutcomeNoneEligible, OutcomeNoneAdmissible, OutcomeTooLarge, OutcomeWait}
}

// Filter says why a candidate was left out; the first that applies counts.
type Filter uint8

// Filters. Those before FilterWindow are eligibility, the others admission.
const (
	FilterNone     Filter = iota
	FilterSuspect         // not heard of for a while
	FilterPaused          // by a command
	FilterDraining        // by a command
	FilterStale           // restarted, its weights are not accepted yet
	FilterDown            // lost, or its engine does not answer
	FilterModel           // serves another model
	FilterLoRA            // has not loaded the adapter
	FilterWeights         // weight version out of the asked range, or unknown
	FilterRank            // has no such data-parallel rank
	FilterContext         // prompt + max_tokens beyond its context length
	FilterCapacity        // prompt + max_tokens beyond a rank's KV capacity
	FilterTried           // failed this request before

	FilterWindow     // as many requests bound as it may hold
	FilterKV         // fullest rank above kv_block, and not yet below kv_unblock
	FilterPreempting // preempted a moment ago

	numFilters
)

var filterNames = [numFilters]string{
	FilterNone: "", FilterSuspect: "suspect", FilterPaused: "paused", FilterDraining: "draining",
	FilterStale: "stale", FilterDown: "down", FilterModel: "model", FilterLoRA: "lora",
	FilterWeights: "weights", FilterRank: "rank", FilterContext: "context", FilterCapacity: "capacity",
	FilterTried: "tried", FilterWindow: "window", FilterKV: "kv_pressure", FilterPreempting: "preempting",
}

// String is the filter's name in records; empty for FilterNone.
func (f Filter) String() string {
	if f < numFilters {
		return filterNames[f]
	}
	return "invalid"
}

// Eligible tells whether a candidate with this filter could serve the request.
func (f Filter) Eligible() bool { return f == FilterNone || f >= FilterWindow }

// Filters is the whole list, FilterNone left out.
func Filters() []Filter {
	out := make([]Filter, 0, numFilters-1)
	for f := FilterNone + 1; f < numFilters; f++ {
		out = append(out, f)
	}
	return out
}

// RateSource says where a rate of projected_time is from.
type RateSource string

// Rate sources; empty where no rate was used.
const (
	RateEngine  RateSource = "engine"  // what it shows in this life, when it is busy
	RateProfile RateSource = "profile" // what it showed before, by its registration or in an earlier life
	RatePeers   RateSource = "peers"   // the mean of the candidates that have one of those
	RateDefault RateSource = "default" // decode_tok_s, prefill_tok_s of the pool
)

// Part is one addend of a score.
type Part uint8

// Parts, with their unit.
const (
	PartRequests Part = iota // requests
	PartTokens               // share of capacity
	PartMatch                // share of the prompt that is cached
	PartCache                // 0..1, tiers weighed
	PartKVFree               // 0..1
	PartSlotFree             // 0..1
	PartQueue                // seconds: waiting and newly reserved work
	PartActive               // seconds: work that runs
	PartPrefill              // seconds: what of the prompt must be computed
	PartBarrier              // seconds: KV pressure
	PartPressure             // share: the fullest of KV, tokens and scheduler
	PartOwner                // 1 owner, 0.5 provisional, 0 neither

	numParts
)

var partNames = [numParts]string{
	"requests", "tokens", "match", "cache", "kv_free", "slots_free", "queue_s", "active_s", "prefill_s", "barrier_s",
	"pressure", "owner",
}

// String is the part's name in records.
func (p Part) String() string {
	if p < numParts {
		return partNames[p]
	}
	return "invalid"
}
