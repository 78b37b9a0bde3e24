package explore

import "time"

// Scenes are those that the protocol is checked in, each to its bounds.
func Scenes() []Scene {
	return []Scene{
		// A seed and its owner end, and nothing fails: small enough to see whole.
		{Name: "end", Dispatchers: 2, Engines: 3, Owners: 1, Seeded: true, Ceiling: 2},
		// The same, and a dispatcher dies at any point: whole too, with 1.4 million states.
		{Name: "dying", Dispatchers: 2, Engines: 3, Owners: 1, Seeded: true, Ceiling: 2, Troubles: Trouble{Crash: 1}},
		// One more request comes meanwhile, and time passes.
		{Name: "calm", Dispatchers: 2, Engines: 3, Owners: 1, Seeded: true, Rollouts: 1, Ceiling: 2, Troubles: Trouble{Jump: 1}},
		// One dispatcher may die at any step of a seed, and its answer may be lost.
		{Name: "death", Dispatchers: 2, Engines: 3, Owners: 1, Rollouts: 1, Ceiling: 2, Troubles: Trouble{Crash: 1, Lost: 1}},
		// Nothing is known of the key: the first owner, and the strays of the race for it.
		{Name: "cold", Dispatchers: 2, Engines: 3, Rollouts: 3, Ceiling: 2,
			Troubles: Trouble{Crash: 1, Lost: 1, NoUsage: 1, Return: 1, Restart: 1}},
		// Its owner is full: who seeds, and whom.
		{Name: "hot", Dispatchers: 2, Engines: 3, Owners: 1, Strays: 1, Rollouts: 2, Ceiling: 2,
			Troubles: Trouble{Crash: 1, Lost: 1, Return: 1, Evict: 1}},
		// A seed is live: its end, by proof or without, by whoever is alive.
		{Name: "seeded", Dispatchers: 2, Engines: 3, Owners: 1, Seeded: true, Rollouts: 2, Ceiling: 3,
			Troubles: Trouble{Crash: 2, Lost: 1, Fail: 1, Return: 1, Unreleased: 1, Redeliver: 1, Jump: 1}},
		// A seed would be one owner too many, unless another one is struck off.
		{Name: "brim", Dispatchers: 2, Engines: 3, Owners: 2, Rollouts: 2, Ceiling: 2,
			Troubles: Trouble{Evict: 1, Restart: 1, Lost: 1, Crash: 1, Jump: 1}},
		// What has a TTL ends: cooldown, markers, the map's entry.
		{Name: "expiry", Dispatchers: 2, Engines: 3, Owners: 1, Seeded: true, Rollouts: 2, Ceiling: 2, OwnerTTL: 10, Jump: longJump,
			Troubles: Trouble{Jump: 2, Return: 1, Crash: 1}},
		// Two keys want the same engine.
		{Name: "two keys", Dispatchers: 2, Engines: 3, Keys: 2, Owners: 1, Rollouts: 3, Ceiling: 2,
			Troubles: Trouble{Crash: 1, Return: 1}},
		// Three dispatchers.
		{Name: "three", Dispatchers: 3, Engines: 3, Owners: 1, Seeded: true, Rollouts: 2, Ceiling: 2,
			Troubles: Trouble{Crash: 1, Lost: 1, Return: 1, NoUsage: 1}},
	}
}

// longJump is beyond the TTL of markers.
const longJump = 65 * time.Second

// Mutants are small scenes in which a guard or a check is taken away.
func Mutants() []Scene {
	return []Scene{
		{Name: "mutant", Mutation: NoWildcardGuard, Dispatchers: 2, Engines: 3, Rollouts: 2, Ceiling: 2},
		{Name: "mutant", Mutation: NoExactGuard, Dispatchers: 2, Engines: 3, Owners: 1, Strays: 1, Rollouts: 2, Ceiling: 3},
		{Name: "mutant", Mutation: LateSeedEnd, Dispatchers: 2, Engines: 3, Owners: 1, Seeded: true, Rollouts: 1, Ceiling: 2, Troubles: Trouble{Return: 1}},
		{Name: "mutant", Mutation: NoCeiling, Dispatchers: 2, Engines: 3, Owners: 2, Rollouts: 1, Ceiling: 2},
		{Name: "mutant", Mutation: NoProof, Dispatchers: 2, Engines: 3, Owners: 1, Seeded: true, Rollouts: 1, Ceiling: 2, Troubles: Trouble{Fail: 1}},
		{Name: "mutant", Mutation: NoCooldown, Dispatchers: 2, Engines: 3, Owners: 1, Seeded: true, Rollouts: 1, Ceiling: 3},
	}
}
