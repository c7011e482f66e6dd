/* The ranks: how they draw what they call, how they make their memory, and their calls one after the other. */

#ifndef TRACED
/* What all ranks call: the first of them to come draws it. With DIFFER each draws its own first call. */
inline draw_call() {
    atomic {
        if
        :: codes[call * RANKS + me]
        :: else ->
            code = (call -> NEXT : FIRST);
            if
            :: code
            :: else -> draw_code()
            fi;
            do
            :: other < RANKS ->
                codes[call * RANKS + other] = (other == me || call || !DIFFER -> code : codes[other]);
                other++
            :: else -> break
            od;
            other = 0
        fi;
        code = codes[call * RANKS + me];
        SAY(me, CALLS_FOR, me, 0, code)
    }
}

inline draw_code() {
    if
    :: code = ALL_REDUCE
    :: code = REDUCE_SCATTER
    :: code = ALL_GATHER
    :: code = GATHER_INTO
    :: code = BROADCAST
    :: code = BROADCAST + 1
    :: code = SLOTS
    :: MOST_CHUNKS > 1 -> code = SLOTS + 1
    :: MOST_CHUNKS > 2 -> code = SLOTS + 2
    :: code = SLOTS_ROOT
    :: MOST_CHUNKS > 1 -> code = SLOTS_ROOT + 1
    :: MOST_CHUNKS > 2 -> code = SLOTS_ROOT + 2
    :: code = SLOTS_ROOT + 3
    :: MOST_CHUNKS > 1 -> code = SLOTS_ROOT + 4
    :: MOST_CHUNKS > 2 -> code = SLOTS_ROOT + 5
    :: RANKS > 2 -> code = SLOTS_TWICE
    :: RANKS > 2 && MOST_CHUNKS > 1 -> code = SLOTS_TWICE + 1
    :: RANKS > 2 && MOST_CHUNKS > 2 -> code = SLOTS_TWICE + 2
    :: code = ALL_TO_ALL_V
    :: code = ALL_GATHER_V
    :: code = COMPARED
    fi
}

inline draw_place() {
    if
    :: place = PRIVATE
    :: place = WINDOW
    :: code == ALL_TO_ALL_V -> place = IN_SLOT
    :: code == ALL_TO_ALL_V -> place = PEER
    fi
}

inline draw_unfit() {
    if
    :: mine_unfit = true; unfit[call] = true
    :: true
    fi
}
#endif

/* Memory is made: rank 0 makes a file, all open it, its name goes, each maps it and reserves its part. */
bool told, named, reserved[RANKS];
byte opened, ready;
inline create() {
    if
    :: me == 0 -> atomic { named = true; told = true }
    :: else -> told
    fi;
    atomic {
        assert(named); /* the file has its name until all have opened it */
        opened++
    }
    opened == RANKS || WITHOUT(OPEN_AGREES);
    if
    :: me == 0 -> named = false
    :: else
    fi;
    atomic {
        if
        :: reserved[me] = true
        :: true
        fi;
        ready++
    }
    ready == RANKS || WITHOUT(MAKE_AGREES);
    atomic {
        private = !reserved[me];
        do
        :: other < RANKS && !WITHOUT(MAKE_AGREES) -> private = private || !reserved[other]; other++
        :: else -> other = 0; break
        od
    }
    if
    :: private -> goto lost
    :: else
    fi
}

active [RANKS] proctype Rank() {
    byte me = _pid - RANKS;
    byte call, code, round, set, chunks;             /* of all collectives so far */
    byte root, chunk, count, number, slot, place;    /* of the present one */
    byte other, at, where, value;
    byte places[RANKS];
    bool mismatch, differ, mine_unfit, window, peer, private;
    c_code { set_up(now.setting); }
#ifdef TRACED
    byte what, owner, cell, read_value;
    bool same;
    c_code { read_run(now.setting); }
#endif
    if
    :: CREATION -> create()
    :: else
    fi;
    do
    :: call < CALLS ->
        draw_call();
        prepare();
        if
        :: code < SLOTS && WITHOUT(WINDOW_BEGIN)
        :: code >= SLOTS && code < ALL_TO_ALL_V && WITHOUT(SLOTS_BEGIN)
        :: code == ALL_TO_ALL_V && WITHOUT(ALL_TO_ALL_V_BEGIN)
        :: code == ALL_GATHER_V && WITHOUT(ALL_GATHER_V_BEGIN)
        :: code == COMPARED && WITHOUT(ROUTES_BEGIN)
        :: else -> begin()
        fi;
        atomic {
            do
            :: other < RANKS ->
                differ = differ || (codes[call * RANKS + other] && codes[call * RANKS + other] != code);
                other++
            :: else -> break
            od;
            assert(mismatch == differ); /* if the calls differ, all ranks find it */
            other = 0;
            differ = false
        }
        if
        :: mismatch || code == COMPARED
        :: !mismatch && code < SLOTS -> in_window()
        :: !mismatch && code >= SLOTS && code < ALL_TO_ALL_V -> in_slots()
        :: !mismatch && (code == ALL_TO_ALL_V || code == ALL_GATHER_V) -> in_node()
        fi;
        atomic {
            root = 0; chunk = 0; count = 0; number = 0; slot = 0; place = 0;
            do
            :: other < RANKS -> places[other] = 0; other++
            :: else -> other = 0; break
            od;
            mismatch = false; mine_unfit = false; window = false; peer = false; private = false;
            code = 0;
            call++
        }
    :: else -> break
    od;
    put(me, INPUT, GONE); /* the process ends, and its private memory with it */
#ifdef TRACED
    accept();
#endif
lost:
    skip
}
