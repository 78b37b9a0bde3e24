package policy

// Knob is one row of the table of knobs: subjects.Settings.Knobs by name.
type Knob struct {
	Name    string
	Policy  string // that reads it; empty = every policy
	Unit    string
	Default float64
	Min     float64
	Max     float64
	Whole   bool // whole numbers only; with bounds 0 and 1 it is a switch
	Doc     string

	set func(*Settings, float64)
}

// Names of the policies.
const (
	LeastRequests = "least_requests"
	KVTokens      = "kv_tokens"
	LoadSnapshot  = "load_snapshot"
	WeightedCache = "weighted_cache"
	ProjectedTime = "projected_time"
	OwnerPressure = "owner_pressure"
)

// Policies is the whole list, the baseline first.
func Policies() []string {
	return []string{LeastRequests, KVTokens, LoadSnapshot, WeightedCache, ProjectedTime, OwnerPressure}
}

// Knobs is the table, in the order in which the documentation shows it.
func Knobs() []Knob {
	out := make([]Knob, len(knobs))
	copy(out, knobs[:])
	return out
}

var knobs = [...]Knob{
	{Name: "kv_block", Unit: "share of KV", Default: 0.90, Min: 0.10, Max: 1,
		Doc: "an engine whose fullest rank is above it takes nothing new",
		set: func(s *Settings, v float64) { s.KVBlock = v }},
	{Name: "kv_unblock", Unit: "share of KV", Default: 0.75, Min: 0.05, Max: 1,
		Doc: "until its fullest rank is below this; must be less than kv_block",
		set: func(s *Settings, v float64) { s.KVUnblock = v }},

	{Name: "sticky_trajectory", Unit: "switch", Default: 0, Min: 0, Max: 1, Whole: true,
		Doc: "turns of a trajectory stay on its last engine, within sticky_margin",
		set: func(s *Settings, v float64) { s.StickyTrajectory = v != 0 }},
	{Name: "sticky_group", Unit: "switch", Default: 0, Min: 0, Max: 1, Whole: true,
		Doc: "samples of a group stay on its last engine while that has a free slot",
		set: func(s *Settings, v float64) { s.StickyGroup = v != 0 }},
	{Name: "sticky_margin", Unit: "requests", Default: 8, Min: 0, Max: 10000, Whole: true,
		Doc: "a trajectory leaves an engine that has more than this many requests above the least loaded one",
		set: func(s *Settings, v float64) { s.StickyMargin = v }},
	{Name: "sticky_threshold", Unit: "load 0..1", Default: 0.90, Min: 0, Max: 1,
		Doc: "a sticky engine is left when its KV use, or its requests over what it can run, are above it",
		set: func(s *Settings, v float64) { s.StickyThreshold = v }},
	{Name: "sticky_cap", Unit: "requests", Default: 0, Min: 0, Max: 10000, Whole: true,
		Doc: "a key sticks to an engine while fewer than this many of its own requests are there; 0 = no cap",
		set: func(s *Settings, v float64) { s.StickyCap = int(v) }},

	{Name: "match_threshold", Policy: LoadSnapshot, Unit: "share of the prompt", Default: 0.5, Min: 0, Max: 1,
		Doc: "an engine belongs to the matched set from this share on",
		set: func(s *Settings, v float64) { s.MatchThreshold = v }},
	{Name: "balance_abs", Policy: LoadSnapshot, Unit: "requests", Default: 16, Min: 0, Max: 10000, Whole: true,
		Doc: "a holder is out of balance with more than this many requests above the least loaded engine",
		set: func(s *Settings, v float64) { s.BalanceAbs = v }},
	{Name: "balance_rel", Policy: LoadSnapshot, Unit: "ratio", Default: 1.5, Min: 1, Max: 100,
		Doc: "and more than this many times its requests",
		set: func(s *Settings, v float64) { s.BalanceRel = v }},

	{Name: "alpha", Policy: WeightedCache, Unit: "weight 0..1", Default: 0.7, Min: 0, Max: 1,
		Doc: "weight of the cache strategy; the load strategies share 1 - alpha",
		set: func(s *Settings, v float64) { s.Alpha = v }},
	{Name: "tier_gpu", Policy: WeightedCache, Unit: "weight 0..1", Default: 0.7, Min: 0, Max: 1,
		Doc: "worth of a cached share of the prompt in GPU memory",
		set: func(s *Settings, v float64) { s.TierGPU = v }},
	{Name: "tier_cpu", Policy: WeightedCache, Unit: "weight 0..1", Default: 0.2, Min: 0, Max: 1,
		Doc: "the same in CPU memory",
		set: func(s *Settings, v float64) { s.TierCPU = v }},
	{Name: "tier_ssd", Policy: WeightedCache, Unit: "weight 0..1", Default: 0.1, Min: 0, Max: 1,
		Doc: "the same on disk",
		set: func(s *Settings, v float64) { s.TierSSD = v }},
	{Name: "weight_kv", Policy: WeightedCache, Unit: "weight", Default: 1, Min: 0, Max: 100,
		Doc: "share of the load strategy free KV",
		set: func(s *Settings, v float64) { s.WeightKV = v }},
	{Name: "weight_slots", Policy: WeightedCache, Unit: "weight", Default: 1, Min: 0, Max: 100,
		Doc: "share of the load strategy free slots; not both shares may be 0",
		set: func(s *Settings, v float64) { s.WeightSlots = v }},

	{Name: "decode_tok_s", Policy: ProjectedTime, Unit: "tokens/s", Default: 2000, Min: 1, Max: 1e6,
		Doc: "decode rate of an engine that reports none and has no profile",
		set: func(s *Settings, v float64) { s.DecodeTokS = v }},
	{Name: "prefill_tok_s", Policy: ProjectedTime, Unit: "tokens/s", Default: 8000, Min: 1, Max: 1e7,
		Doc: "prefill rate of an engine that reports none and has no profile",
		set: func(s *Settings, v float64) { s.PrefillTokS = v }},
	{Name: "rate_bound", Policy: ProjectedTime, Unit: "ratio", Default: 10, Min: 1, Max: 1000,
		Doc: "a reported rate counts as at most this many times the profile or default, and at least its inverse",
		set: func(s *Settings, v float64) { s.RateBound = v }},
	{Name: "active_share", Policy: ProjectedTime, Unit: "share of output", Default: 0.5, Min: 0, Max: 1,
		Doc: "what of the output that running requests still have to make counts: it is made beside the request's own, not before it",
		set: func(s *Settings, v float64) { s.ActiveShare = v }},
	{Name: "interference", Policy: ProjectedTime, Unit: "share of prefill", Default: 0.5, Min: 0, Max: 10,
		Doc: "what a prefill costs each request that is there, since its steps get longer, of the time it takes",
		set: func(s *Settings, v float64) { s.Interference = v }},
	{Name: "barrier", Policy: ProjectedTime, Unit: "s", Default: 0.15, Min: 0, Max: 60,
		Doc: "KV barrier at half occupancy: barrier x k / (1 - k)",
		set: func(s *Settings, v float64) { s.Barrier = v }},
	{Name: "credit_cpu", Policy: ProjectedTime, Unit: "share", Default: 0.75, Min: 0, Max: 1,
		Doc: "how much of a block's prefill a hit in CPU memory saves; a hit in GPU memory saves all of it",
		set: func(s *Settings, v float64) { s.CreditCPU = v }},
	{Name: "credit_ssd", Policy: ProjectedTime, Unit: "share", Default: 0.25, Min: 0, Max: 1,
		Doc: "the same for a hit on disk",
		set: func(s *Settings, v float64) { s.CreditSSD = v }},
	{Name: "approximate_credit", Policy: ProjectedTime, Unit: "switch", Default: 0, Min: 0, Max: 1, Whole: true,
		Doc: "give credit for a cache view that is only estimated (an engine without cache events); owner_pressure: such an engine may become an owner",
		set: func(s *Settings, v float64) { s.ApproximateCredit = v != 0 }},
	{Name: "escape_ratio", Policy: ProjectedTime, Unit: "ratio", Default: 3, Min: 1, Max: 1000,
		Doc: "hard escape: the winner's load seconds exceed this many times the least load seconds",
		set: func(s *Settings, v float64) { s.EscapeRatio = v }},
	{Name: "escape_floor", Policy: ProjectedTime, Unit: "s", Default: 5, Min: 0, Max: 3600,
		Doc: "by more than this",
		set: func(s *Settings, v float64) { s.EscapeFloor = v }},
	{Name: "tie_ratio", Policy: ProjectedTime, Unit: "share", Default: 0.02, Min: 0, Max: 0.5,
		Doc: "engines within this share of the least time are as good as it: noise in measured rates must not choose",
		set: func(s *Settings, v float64) { s.TieRatio = v }},
	{Name: "wait_max", Policy: ProjectedTime, Unit: "s", Default: 0, Min: 0, Max: 60,
		Doc: "longest a request may be held for a full engine that holds its prefix, counted from its acceptance; 0 = never",
		set: func(s *Settings, v float64) { s.WaitMax = seconds(v) }},

	{Name: "watermark", Policy: OwnerPressure, Unit: "pressure", Default: 0.90, Min: 0.10, Max: 1,
		Doc: "an owner is pressured from it on: the fullest of KV use, tokens over capacity and (running + waiting) / max_running",
		set: func(s *Settings, v float64) { s.Watermark = v }},
	{Name: "owner_slack", Policy: OwnerPressure, Unit: "pressure", Default: 0.10, Min: 0, Max: 1,
		Doc: "owners within it of the least pressured one are as good; the one that holds most of the prompt keeps the work",
		set: func(s *Settings, v float64) { s.OwnerSlack = v }},
	{Name: "owner_ceiling", Policy: OwnerPressure, Unit: "owners", Default: 4, Min: 1, Max: 64, Whole: true,
		Doc: "owners of one key at most; 1 = never a seed",
		set: func(s *Settings, v float64) { s.OwnerCeiling = int(v) }},
	{Name: "seed_cooldown", Policy: OwnerPressure, Unit: "s", Default: 5, Min: 1, Max: 3600, Whole: true,
		Doc: "after a proven seed the key gets no other for this long",
		set: func(s *Settings, v float64) { s.SeedCooldown = seconds(v) }},
	{Name: "owner_ttl", Policy: OwnerPressure, Unit: "s", Default: 3600, Min: 10, Max: 86400, Whole: true,
		Doc: "an entry of the owner map ends when no owner has finished a request of the key for this long",
		set: func(s *Settings, v float64) { s.OwnerTTL = seconds(v) }},
}
