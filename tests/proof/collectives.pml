/* The collectives, as commengine/operations and slots.py run them. */

/* What stands before the comparison of calls: the program's data, a first slot. */
inline prepare() {
    atomic {
        if
        :: code < SLOTS ->
            root = (code < BROADCAST -> ALL : code - BROADCAST);
            value = (root == me -> MADE : GIVEN);
            write_part(value);
            value = 0
        :: code >= SLOTS && code < ALL_TO_ALL_V ->
            root = (code < SLOTS_ROOT || code >= SLOTS_TWICE -> ALL : (code - SLOTS_ROOT) / 3);
            count = (code - SLOTS) % 3 + 1;
            fill()
        :: code == ALL_TO_ALL_V || code == ALL_GATHER_V ->
            draw_place();
            slot = (chunks + 1) % 2;
            if
            :: place == WINDOW -> write_part(GIVEN)
            :: place == PEER -> put(me, INPUT, GIVEN)
            :: place == IN_SLOT -> put(me, SLOT + slot, GIVEN)
            :: place == PRIVATE
            fi
        :: code == COMPARED
        fi
    }
}

inline fill() {
    atomic {
        number = chunks + chunk + 1;
        slot = number % 2;
        if
        :: root == ALL || root == me -> put(me, SLOT + slot, CHUNK)
        :: else
        fi;
        MARK(FILLS, me, SLOT + slot)
    }
}

inline in_window() {
    if
    :: code == ALL_REDUCE -> copy(PART + me, GIVEN, ALL); write_rows()
    :: code == REDUCE_SCATTER -> take(PART + me, GIVEN, ALL)
    :: code == ALL_GATHER -> take(PART, GIVEN, ALL)
    :: code == GATHER_INTO -> write_rows()
    :: code >= BROADCAST && root != me -> copy(PART, MADE, root); write_part(MADE)
    :: code >= BROADCAST && root == me
    fi;
    if
    :: code == ALL_REDUCE && WITHOUT(ALL_REDUCE_END)
    :: code == REDUCE_SCATTER && WITHOUT(REDUCE_SCATTER_END)
    :: code == ALL_GATHER && WITHOUT(ALL_GATHER_END)
    :: code == GATHER_INTO && WITHOUT(GATHER_INTO_END)
    :: code >= BROADCAST && WITHOUT(BROADCAST_END)
    :: else -> end_by_meeting(false)
    fi;
    if
    :: code == REDUCE_SCATTER || code == ALL_GATHER
    :: else -> read_part(MADE)
    fi
}

inline in_slots() {
    do
    :: atomic { MARK(TAKES, me, SLOT + slot) }
        if
        :: code >= SLOTS_TWICE ->
            copy(SLOT + slot, CHUNK, ALL);
            TOGETHER {
                put(me, RESULT + slot, CHUNK);
                if
                :: WITHOUT(REDUCED_POST)
                :: else -> post(REDUCED, number)
                fi;
                if
                :: WITHOUT(REDUCED_WAIT)
                :: else -> await(REDUCED, number)
                fi
            }
            take(RESULT + slot, CHUNK, ALL)
        :: code < SLOTS_TWICE && root != me -> take(SLOT + slot, CHUNK, root)
        :: code < SLOTS_TWICE && root == me
        fi;
        chunk++;
        if
        :: chunk == count -> break
        :: else
        fi;
        TOGETHER {
            fill();
            if
            :: WITHOUT(FILLED_POST)
            :: else -> post(FILLED, number)
            fi;
            if
            :: WITHOUT(FILLED_WAIT)
            :: else -> await(FILLED, number)
            fi
        }
    od;
    chunks = chunks + count
}

inline in_node() {
    atomic {
        window = place == WINDOW;
        peer = place == PEER;
        private = place == PRIVATE;
        chunks = (code == ALL_TO_ALL_V -> chunks + 1 : chunks)
    }
    do
    :: other < RANKS ->
        if
        :: other == me
        :: else -> atomic {
            load(other, TOLD + set);
            assert(value / 4 == call + 1); /* the numbers of rows are those of this call */
            places[other] = value % 4;
            value = 0;
            window = window || places[other] == WINDOW;
            peer = peer || places[other] == PEER;
            private = private || places[other] == PRIVATE
           }
        fi;
        other++
    :: else -> break
    od;
    atomic { other = 0; draw_unfit() }
    do
    :: other < RANKS && !private && !mine_unfit ->
        if
        :: other == me
        :: other != me && places[other] == WINDOW -> read(other, PART + me, GIVEN)
        :: other != me && places[other] == PEER -> read(other, INPUT, GIVEN)
        :: other != me && places[other] == IN_SLOT -> read(other, SLOT + slot, GIVEN)
        fi;
        other++
    :: else -> break
    od;
    other = 0;
    if
    :: code == ALL_TO_ALL_V && (private || (!window && !peer))
    :: code == ALL_TO_ALL_V && !private && window && WITHOUT(ALL_TO_ALL_V_END)
    :: code == ALL_TO_ALL_V && !private && !window && peer && WITHOUT(ALL_TO_ALL_V_PEERS_END)
    :: code == ALL_GATHER_V && WITHOUT(ALL_GATHER_V_END)
    :: else -> end_by_meeting((code == ALL_GATHER_V || window))
    fi
}
