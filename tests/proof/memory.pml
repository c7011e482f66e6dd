/* Memory in which each rank has a buffer for its stores. With ORDER_X86 the stores leave in their order, and a fence
 * waits until all have left. With ORDER_WEAK they leave in any order, except two to one cell, and none before a fence
 * that it follows; and a load may read what a cell held at any time since the rank's last fence (`seen`: its processor
 * ran it early), or, if it copies data, be done as late as at the next fence (`late`).
 */
#ifndef LONGEST
#define LONGEST 6
#endif
#define FENCE 255 /* stands in a buffer between the stores before it and those after it */

byte memory[RANKS * CELLS];
typedef Stores { byte count; byte at[LONGEST]; byte value[LONGEST] };
Stores stored[RANKS];
bool waiting[RANKS], over[RANKS]; /* with DEATH: a rank waits; its time is over */
#ifdef ORDER_WEAK
typedef View { byte value[RANKS * CELLS] };
View seen[RANKS];
typedef Loads { byte count; byte at[RANKS]; byte expected[RANKS] };
Loads late[RANKS];
#endif

/* Events: those that recorded runs have are given to NOTE, and, where a slot is filled and taken, to MARK. */
#define WRITES 1
#define READS 2
#define FENCES 3
#define FILLS 4
#define TAKES 5
#define LEAVES 6
#define CALLS_FOR 7
#define LOSES 8
#define SAY(rank, what, owner, cell, number) printf("step %d %d %d %d %d\n", rank, what, owner, cell, number)
#ifdef TRACED
#include "traced.pml"
#else
#define NOTE(what, owner, cell, number) SAY(me, what, owner, cell, number)
#define MARK(what, owner, cell) skip
#define TOGETHER atomic
#endif

/* A store of data, and one of a word of the flags. */
inline put(owner, cell, number) {
    atomic {
        stored[me].count < LONGEST;
        stored[me].at[stored[me].count] = AT(owner, cell);
        stored[me].value[stored[me].count] = number;
        stored[me].count++;
        SAY(me, WRITES, owner, cell, number)
    }
}
inline store(owner, cell, number) {
    atomic { put(owner, cell, number); NOTE(WRITES, owner, cell, number) }
}

/* value: what a load reads. A rank sees its own stores at once. */
inline fetch(owner, cell) {
    where = AT(owner, cell);
    at = stored[me].count;
    do
    :: at > 0 && stored[me].at[at - 1] != where -> at--
    :: else -> break
    od;
    if
    :: at > 0 -> value = stored[me].value[at - 1]
#ifdef ORDER_WEAK
    :: at == 0 && seen[me].value[where] != memory[where] -> value = seen[me].value[where]
    :: at == 0 -> value = memory[where]; seen[me].value[where] = value
#else
    :: else -> value = memory[where]
#endif
    fi;
    at = 0;
    where = 0
}

/* A load of a word, and one of data whose value is known, which may be done late. `look`: what it reads is needed. */
inline load(owner, cell) {
    atomic { fetch(owner, cell); NOTE(READS, owner, cell, value) }
}
inline look(owner, cell, expected) {
    atomic {
        fetch(owner, cell);
        SAY(me, READS, owner, cell, value);
        assert(value == expected); /* the data are those of this call */
        value = 0
    }
}
#ifdef ORDER_WEAK
inline read(owner, cell, number) {
    atomic {
        assert(late[me].count < RANKS);
        late[me].at[late[me].count] = AT(owner, cell);
        late[me].expected[late[me].count] = number;
        late[me].count++
    }
}
#else
#define read(owner, cell, expected) look(owner, cell, expected)
#endif

/* A load that is repeated until it finds the value, or more. With DEATH its time may run out at any moment. */
inline wait(word, wanted) {
    waiting[me] = DEATH;
    if
    :: memory[AT(other, word)] >= wanted ->
        waiting[me] = false;
#ifdef ORDER_WEAK
        seen[me].value[AT(other, word)] = memory[AT(other, word)];
#endif
        value = memory[AT(other, word)];
        NOTE(READS, other, word, value);
        value = 0
    :: over[me] -> SAY(me, LOSES, other, word, wanted); goto lost
    fi
}

inline fence() {
    atomic {
#ifdef ORDER_WEAK
        late[me].count == 0 && stored[me].count < LONGEST;
        if
        :: stored[me].count -> put(0, FENCE, 0)
        :: else
        fi;
        d_step {
            at = 0;
            do
            :: at < RANKS * CELLS -> seen[me].value[at] = memory[at]; at++
            :: else -> break
            od;
            at = 0
        }
#else
        stored[me].count == 0;
#endif
        NOTE(FENCES, me, 0, 0)
    }
}

/* Store number `at` of a rank leaves its buffer, and the fences that are then at its head. */
inline leave() {
    where = stored[me].at[at];
    value = stored[me].value[at];
#ifdef ORDER_WEAK
    reader = 0;
    do
    :: reader < RANKS ->
        if /* a reader that has not seen the cell's last value may see it later, though then another follows */
        :: seen[reader].value[where] != memory[where] -> seen[reader].value[where] = memory[where]
        :: true
        fi;
        reader++
    :: else -> break
    od;
    reader = 0;
    seen[me].value[where] = value;
#endif
    memory[where] = value;
    SAY(me, LEAVES, where / CELLS, where % CELLS, value);
    d_step {
        do
        :: at + 1 < stored[me].count ->
            stored[me].at[at] = stored[me].at[at + 1];
            stored[me].value[at] = stored[me].value[at + 1];
            at++
        :: stored[me].count > 0 && at + 1 >= stored[me].count ->
            stored[me].count--;
            stored[me].at[stored[me].count] = 0;
            stored[me].value[stored[me].count] = 0;
            at = 0;
            if
            :: stored[me].at[0] == FENCE && stored[me].count > 0
            :: else -> break
            fi
        od;
        at = 0;
        where = 0;
        value = 0
    }
}

active [RANKS] proctype Memory() {
    byte me = _pid;
    byte at, where, value, reader;
end:
    do
    :: atomic {
        stored[me].count > 0 ->
#ifdef ORDER_WEAK
        do
        :: at + 1 < stored[me].count && stored[me].at[at] != FENCE && stored[me].at[at + 1] != FENCE -> at++
        :: break
        od;
        reader = 0;
        do
        :: reader < at && stored[me].at[reader] != stored[me].at[at] -> reader++
        :: reader < at && stored[me].at[reader] == stored[me].at[at] -> at = reader
        :: reader >= at -> break
        od;
        reader = 0;
#endif
        leave()
       }
    :: waiting[me] && !over[me] -> over[me] = true
#ifdef ORDER_WEAK
    :: atomic {
        late[me].count > 0 ->
        where = late[me].at[0];
        if
        :: seen[me].value[where] != memory[where] -> value = seen[me].value[where]
        :: value = memory[where]; seen[me].value[where] = value
        fi;
        SAY(me, READS, where / CELLS, where % CELLS, value);
        assert(value == late[me].expected[0]); /* the data are those of this call */
        d_step {
            at = 0;
            do
            :: at + 1 < late[me].count ->
                late[me].at[at] = late[me].at[at + 1];
                late[me].expected[at] = late[me].expected[at + 1];
                at++
            :: else -> break
            od;
            late[me].count--;
            late[me].at[late[me].count] = 0;
            late[me].expected[late[me].count] = 0;
            at = 0;
            where = 0;
            value = 0
        }
       }
#endif
    od
}
