import time, ops, watched, pathlib, board_live_test
def test_try():
    try:
        board_live_test.Training()
    finally:
        for p in pathlib.Path('.').glob('*.log'): print('==',p, p.read_text()[-700:])
