/* The flags, slots and windows of commengine/shared_memory, and how commengine/operations uses them, for SPIN.
 *
 * Defines: RANKS; ORDER_X86 or ORDER_WEAK (memory.pml); TRACED: the accesses must be those of a recorded run. What else
 * a run of the model asks stands in `setting`, so that one compilation serves them all.
 *
 * A step of a rank is one load, with the stores and waits before it: nobody else sees a store before it leaves its
 * buffer, and a wait that has ended stays ended, so these need no steps of their own.
 */

/* The cells of a rank. ASKED: place, size and operation, checksum, which are written and read together; TOLD: the place
 * and the numbers of rows of an uneven collective; both twice. SLOT, RESULT: a slot's two areas. INPUT: private memory,
 * which other ranks read in the process. PART: this rank's part of a window, in rows. */
#define ROUND 0
#define ASKED 1
#define TOLD 3
#define FILLED 5
#define REDUCED 6
#define UNFIT 7
#define SLOT 8
#define RESULT 10
#define INPUT 12
#define PART 13
#define CELLS (PART + RANKS)
#define AT(rank, cell) ((rank) * CELLS + (cell))

/* What a rank asks for, all in one number. SLOTS: an all-gather, a reduce-scatter, an all-reduce of two ranks. TWICE:
 * an all-reduce of more ranks through slots. COMPARED: a call that begins as the others do and goes by MPI. */
#define ALL_REDUCE 1
#define REDUCE_SCATTER 2
#define ALL_GATHER 3
#define GATHER_INTO 4
#define BROADCAST 5     /* and 6, from the second rank */
#define SLOTS 7         /* of 1 chunk; 8 and 9 of 2 and 3, and so with the next ones */
#define SLOTS_ROOT 10   /* a broadcast; from 13 on from the second rank */
#define SLOTS_TWICE 16
#define ALL_TO_ALL_V 19
#define ALL_GATHER_V 20
#define COMPARED 21

/* where a rank's rows of an uneven collective lie */
#define PRIVATE 0
#define IN_SLOT 1
#define PEER 2
#define WINDOW 3

/* the data: what call `call` reads, and what is left of it */
#define GIVEN (2 * call + 1)
#define MADE (2 * call + 2)
#define CHUNK (4 * call + chunk + 1)
#define GONE 255

/* The settings of a run: the number of a wait or a fence that is left out (names.pml); the codes of the first and of
 * the other collectives, 0 if they are drawn; how many follow each other; the most chunks of one; whether the ranks'
 * first calls may differ; whether a wait may run out, because a rank has died at any step; whether a rank may get no
 * memory. */
byte setting[8];
#define WITHOUT(name) (setting[0] == name)
#define FIRST setting[1]
#define NEXT setting[2]
#define CALLS setting[3]
#define MOST_CHUNKS setting[4]
#define DIFFER setting[5]
#define DEATH setting[6]
#define CREATION setting[7]
c_decl {
    static void set_up(unsigned char *setting) {
        const char *words = getenv("SETTING");
        for (int at = 0; at < 8; at++) setting[at] = (unsigned char) strtol(words, (char **) &words, 10);
    }
}

#define MOST_CALLS 4
byte codes[MOST_CALLS * RANKS]; /* what each rank asks for; 0: it has not begun */
bool unfit[MOST_CALLS];         /* whether a rank has found numbers of rows that do not fit */

#include "names.pml"
#include "memory.pml"

/* Flags ---------------------------------------------------------------------------------------------------------- */

inline await(word, wanted) {
    TOGETHER {
        other = 0;
        do
        :: other < RANKS ->
            if
            :: other == me
            :: else -> wait(word, wanted)
            fi;
            other++
        :: else -> break
        od;
        other = 0;
        if
        :: WITHOUT(AWAIT_FENCE)
        :: else -> fence()
        fi
    }
}

inline meet() {
    TOGETHER {
        round++;
        if
        :: WITHOUT(MEET_FENCE)
        :: else -> fence()
        fi;
        store(me, ROUND, round);
        if
        :: WITHOUT(MEET_WAIT)
        :: else -> await(ROUND, round)
        fi
    }
}

inline post(word, count) {
    if
    :: WITHOUT(POST_FENCE)
    :: else -> fence()
    fi;
    store(me, word, count)
}

/* `begin`, and `begin_uneven`, which tells the others the numbers of rows first. */
inline begin() {
    TOGETHER {
        set = 1 - set;
        if
        :: code == ALL_TO_ALL_V || code == ALL_GATHER_V -> store(me, TOLD + set, 4 * (call + 1) + place)
        :: else
        fi;
        store(me, ASKED + set, code);
        if
        :: code < ALL_TO_ALL_V && WITHOUT(BEGIN_MEET)
        :: code == COMPARED && WITHOUT(BEGIN_MEET)
        :: (code == ALL_TO_ALL_V || code == ALL_GATHER_V) && WITHOUT(BEGIN_UNEVEN_MEET)
        :: else -> meet()
        fi
    }
    do
    :: other < RANKS && !mismatch ->
        if
        :: other == me
        :: else -> atomic { load(other, ASKED + set); mismatch = value != code; value = 0 }
        fi;
        other++
    :: else -> break
    od;
    other = 0
}

/* The end of a collective, by `meet`; where numbers of rows may not fit, by `meet_unless`. */
inline end_by_meeting(unless_unfit) {
    TOGETHER {
        if
        :: unless_unfit && mine_unfit -> store(me, UNFIT, round + 1)
        :: else
        fi;
        if
        :: unless_unfit && WITHOUT(MEET_UNLESS_MEET)
        :: else -> meet()
        fi
    }
    do
    :: unless_unfit && other < RANKS && !mismatch ->
        atomic { load(other, UNFIT); mismatch = value == round; value = 0; other++ }
    :: else -> break
    od;
    other = 0;
    assert(!unless_unfit || mismatch == unfit[call]) /* numbers of rows that do not fit are an error of all ranks */
}

/* Data ----------------------------------------------------------------------------------------------------------- */

#define ALL 255

/* Read `cell` of each other rank, or of `from` alone. The value must be that of the present call. */
inline take(cell, expected, from) {
    do
    :: other < RANKS ->
        if
        :: other == me || (from != ALL && other != from)
        :: else -> read(other, cell, expected)
        fi;
        other++
    :: else -> break
    od;
    other = 0
}

/* The same, where what the rank writes next is made of it. */
inline copy(cell, expected, from) {
    do
    :: other < RANKS ->
        if
        :: other == me || (from != ALL && other != from)
        :: else -> look(other, cell, expected)
        fi;
        other++
    :: else -> break
    od;
    other = 0
}

/* The program, or a broadcast, writes this rank's part; the program reads it. */
inline write_part(number) {
    atomic {
        do
        :: other < RANKS -> put(me, PART + other, number); other++
        :: else -> break
        od;
        other = 0
    }
}
inline read_part(number) {
    do
    :: other < RANKS -> atomic { look(me, PART + other, number); other++ }
    :: else -> break
    od;
    other = 0
}

/* This rank's row of all parts becomes the result. */
inline write_rows() {
    atomic {
        do
        :: other < RANKS -> put(other, PART + me, MADE); other++
        :: else -> break
        od;
        other = 0
    }
}

#include "collectives.pml"
#include "ranks.pml"
