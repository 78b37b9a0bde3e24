// Package contest lets our policies and the baselines serve the same workloads
// on the same modelled engines, seed by seed, and reports what came of it.
//
//	workload --pace--> bus model + production cores --> nodes  --.
//	                   or a router                  --> engines --+--> figures --> report
//
// A contender of ours runs in package sim: real cores, guarded binds, views that
// lag, load and cache reports. A router of package baseline decides on arrival
// and knows its own counters without delay. The engine model is the same.
//
// A bench is a function of a Config: it makes a case for each seed, chooses the
// setting of each baseline on seeds of its own, runs everybody on the same
// cases, and checks its targets. Missed targets are reported with their figure
// and reason. The same configuration gives the same report.
package contest
