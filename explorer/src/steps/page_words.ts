/** The words of the live page of steps in English and Korean. */

import type { Language } from "./page_state.ts";

const WORDS = {
  title: ["Attention, step by step", "어텐션, 한 단계씩"],
  sentence: ["Sentence", "문장"],
  translate: ["Translate", "번역"],
  mechanism: ["Mechanism", "메커니즘"],
  translators: ["Trained translators", "학습된 번역기"],
  examples: ["Worked examples with whole numbers", "작은 정수로 푸는 예제"],
  kind: ["Attention", "어텐션"],
  cross: ["decoder to source (cross)", "디코더 → 원문 (크로스)"],
  self: ["decoder to its own words (self)", "디코더 자신 (셀프)"],
  encoder: ["encoder (self)", "인코더 자신 (셀프)"],
  layer: ["Layer", "층"],
  head: ["Head", "헤드"],
  allHeads: ["all", "모두"],
  language: ["Language", "언어"],
  smaller: ["Smaller type", "글자 작게"],
  larger: ["Larger type", "글자 크게"],
  dark: ["Dark", "어둡게"],
  light: ["Light", "밝게"],
  source: ["Source", "원문"],
  ofWord: ["Source word that attends", "보는 단어"],
  word: ["Word to predict", "예측할 단어"],
  query: ["Query whose row changes", "바꿀 질의"],
  opens: ["in a window of its own", "새 창에서 열기"],
  begin: ["(begin)", "(시작)"],
  end: ["(end)", "(끝)"],
  next: ["Next word", "다음 단어"],
  changes: ["the next word changes", "다음 단어가 바뀝니다"],
  stays: ["the next word stays", "다음 단어는 그대로입니다"],
  whatIf: ["What if …", "바꿔 보기"],
  score: ["Score", "점수 함수"],
  trained: ["as trained: {}", "학습한 대로: {}"],
  given: ["as it is: {}", "그대로: {}"],
  scale: ["divide by √d", "√d로 나누기"],
  key: ["Key", "키"],
  attend: ["Mask: attend", "마스크: 참조"],
  attendTo: ["attend to {}", "{} 보기"],
  add: ["Add to the score", "점수에 더하기"],
  addTo: ["add to the score of {}", "{}의 점수에 더하기"],
  weight: ["Weight", "가중치"],
  reset: ["Undo all changes", "모두 처음대로"],
  allHeadsNote: ["A change is made in all heads.", "모든 헤드를 함께 바꿉니다."],
  marked: [
    "Marked numbers changed; the number before is struck out.",
    "표시한 수가 바뀌었습니다. 줄을 그은 수가 바꾸기 전의 값입니다.",
  ],
  leftOut: ["No longer computed: {}", "이제 계산하지 않는 단계: {}"],
  was: ["was {}", "이전 값 {}"],
  predict: ["Predict, then reveal", "예측하고 확인하기"],
  covered: ["covered: {}", "가려짐: {}"],
  prediction: ["Your prediction", "예측한 값"],
  checkIt: ["Reveal and check", "확인하기"],
  hits: ["{} right", "맞힘: {}"],
  hit: ["{}: right", "{}: 맞음"],
  miss: ["{}: not as predicted", "{}: 예측과 다름"],
  revealTable: ["Reveal this table", "이 표 보기"],
  revealAll: ["Reveal all", "모두 보기"],
  coverAgain: ["Cover again", "다시 가리기"],
  keys: ["Space: the next number. Enter: the rest of its table.", "스페이스: 다음 수. 엔터: 그 표의 나머지."],
  steps: ["Steps", "단계"],
  byHand: ["by hand", "손으로"],
  sum: ["sum", "합"],
  more: ["… {} more", "… 외 {}개"],
  computing: ["computing …", "계산하는 중 …"],
  command: ["The same in a terminal", "터미널에서 같은 표를 보려면"],
  offline: [
    "This page has no server: it has this sentence, word by word, and one change at a time. Whatever else: {}",
    "서버 없이 연 페이지라서, 이 문장의 단어와 한 번에 한 가지 변경만 들어 있습니다. 다른 것은: {}",
  ],
  offlineExample: [
    "This page has no server: masks, score and 1/√d are changed together, numbers are added one at a time. Whatever else: {}",
    "서버 없이 연 페이지라서, 마스크와 점수 함수와 √d는 함께, 점수에 더하는 수는 한 번에 하나만 바꿀 수 있습니다. 다른 것은: {}",
  ],
  notComputed: [
    "This page has not computed that. Where regard is installed: {}",
    "이 페이지에는 그 계산이 들어 있지 않습니다. regard가 설치된 곳에서: {}",
  ],
} as const;

export type PageWord = keyof typeof WORDS;
export type Say = (word: PageWord, fill?: string) => string;

export function saying(language: Language): Say {
  return (word, fill = "") => WORDS[word][language === "ko" ? 1 : 0].replace("{}", () => fill);
}
